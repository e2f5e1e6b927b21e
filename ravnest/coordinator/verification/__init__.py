"""Verification: whether the model in the file is the one that the swarm evaluated.

Knows `plan` and below. Runs the model on the requester's machine, and talks to no provider.
"""
