"""Parts of benchmarks.averaging: the members of each contender, their processes, and the training run."""
