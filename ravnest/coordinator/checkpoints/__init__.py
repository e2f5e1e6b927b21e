"""Checkpoints: saved states of a run on the requester's disk, when to take one, and reading them back.

Knows the position of the data, but no plans, links or providers. May import `feed` and below.
"""
