"""Checkpoints: saved states of a run on the requester's disk, when to take one, and reading them back.

Knows `feed` and below: where the data stands. Knows nothing of plans, links and the providers that upload the parts.
"""
