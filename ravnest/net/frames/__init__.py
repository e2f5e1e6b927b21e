"""Frames: the unit that flows over a link, as bytes and back.

Knows tensors and limits, and nothing of connections.
"""
