"""Access: which nodes may join a swarm, and the store of a served run.

Knows certificates and SQLite. Imports no other package of the coordinator.
"""
