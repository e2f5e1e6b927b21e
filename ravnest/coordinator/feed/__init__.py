"""Feed: the requester's data in order, and the ledger of what became of each microbatch.

May import `swarm` and `access`. Knows clusters as lists of stages, and nothing of links.
"""
