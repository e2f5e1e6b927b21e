"""Parts of benchmarks.pipeline: its models, the cells of its table, and the processes of the contenders."""
