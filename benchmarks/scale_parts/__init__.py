"""Parts of benchmarks.scale: its tasks, the processes of the contenders, and the bounds of its targets."""
