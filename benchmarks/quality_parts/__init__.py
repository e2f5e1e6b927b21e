"""Parts of benchmarks.quality: the tasks, pipelines in virtual time, one training run, and the study of all runs."""
