"""Replicas: which copies of the stages' state exist, which providers hold them, and how they reach a stage.

Knows `run` and below: the clusters, the swarm and what the plan says of a stage. Knows nothing of recovery decisions.
"""
