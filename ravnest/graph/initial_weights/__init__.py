"""Initial weights: the recipes of random and constant tensors, found where they are drawn, and repeated elsewhere.

Knows tensors and generators, and nothing of stages.
"""
