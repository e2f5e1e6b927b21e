"""The parts of benchmarks/quality.py: what is learnt, pipelines in virtual time, one training run, all of them."""
