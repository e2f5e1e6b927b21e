"""Feed: the requester's data in order, the state of each cluster, and the ledger of every microbatch.

Knows `swarm` and `access`, and clusters as lists of stages. Knows nothing of links.
"""
