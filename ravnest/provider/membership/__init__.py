"""Membership: how a provider joins a swarm, stays in it, and measures its connections.

May import `machine`. Knows nothing of stages.
"""
