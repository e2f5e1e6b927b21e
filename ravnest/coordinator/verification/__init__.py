"""Verification: whether the model in the file is the one that the swarm evaluated.

Knows the captured graph and the evaluated batches. Runs the model on the requester's machine, and talks to no provider.
May import `plan` and below.
"""
