"""Portable graph: capture, format, operator allow-list, measured costs, and partition into stages.

Knows torch, the specs of optimizers and the errors. May know no other package of Ravnest: a provider and the
requester use the same graph.
"""
