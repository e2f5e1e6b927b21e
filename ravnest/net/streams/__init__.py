"""Streams: ordered frames and messages over one connection, or over as many as it takes.

May import `frames` and `identity`.
"""
