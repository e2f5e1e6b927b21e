"""Cutting a graph into stages: where it may be cut, what crosses the cuts, and who looks rows of a weight up.

May know portable graphs, aliases and operators. Knows nothing of weights as tensors, or of providers.
"""
