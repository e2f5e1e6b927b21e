"""RPC: the calls between nodes, on the serving and the calling side.

Knows the messages of control.proto. May import every other room of `net`.
"""
