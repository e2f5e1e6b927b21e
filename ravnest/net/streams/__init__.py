"""Streams: ordered frames and messages, over one connection or over as many as it takes.

Knows gRPC's streams, and nothing of calls and their handlers. May import `frames`, `identity` and `pacing`.
"""
