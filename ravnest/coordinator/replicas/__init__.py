"""Replicas: the copies of the stages' state, the providers that hold them, and their transfer to a stage.

Knows the clusters, the swarm and the stages of the plan. Does not decide about recovery: `recovery` does. May import
`run` and below.
"""
