"""Weights of one stage: versions and gradients of parameters, states that the model changes, and optimizer moments.

May know torch and the optimizer specification. Knows nothing of microbatches beyond their numbers.
"""
