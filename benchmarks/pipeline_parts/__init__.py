"""The parts of benchmarks.pipeline: its models, the cells of its table, and the processes of both contenders."""
