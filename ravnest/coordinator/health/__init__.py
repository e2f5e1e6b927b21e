"""Health: which provider is silent, stalled, slow or wrong, and why nothing is completed.

Knows the swarm, the clusters and the checkpoints that are awaited. Decides which provider to give up; `recovery`
decides what replaces it. May import `plan` and below.
"""
