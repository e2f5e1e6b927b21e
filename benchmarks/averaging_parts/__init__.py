"""The parts of benchmarks.averaging: the members of each contender, how they are started, and the training run."""
