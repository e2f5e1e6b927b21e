"""Probe: how fast a connection is, and whether a node can be reached.

May import `streams` and `identity`.
"""
