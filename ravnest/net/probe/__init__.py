"""Probe: measures how fast a connection is, and whether a node can be reached.

Knows timings and bytes, and nothing of what they are used for. May import `streams` and `identity`.
"""
