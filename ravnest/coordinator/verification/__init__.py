"""Verification: whether the model that was written is the one that the swarm evaluated.

May import `plan` and below. Runs the model on the requester's machine and talks to no provider.
"""
