"""The parts of benchmarks/quality.py: what is learned, pipelines in virtual time, one training run, all of them."""
