"""Feed: the requester's data in order, the state of each cluster, and the ledger of every microbatch.

Knows clusters as lists of stages, but no links. May import `swarm` and `access`.
"""
