"""The parts of benchmarks/quality.py: what is learnt, a pipeline in virtual time, one training run, the study of all."""
