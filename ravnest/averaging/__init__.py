"""Averaging between clusters: the arithmetic of rings, the decisions of a round, and checks of all that members send.

Knows `codecs`, `errors` and `safe_json`. No sockets and no clock: callers pass messages and times in.
"""
