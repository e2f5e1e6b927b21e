"""RPC: the calls between nodes, both the serving and the calling side.

May import every other room of `net`.
"""
