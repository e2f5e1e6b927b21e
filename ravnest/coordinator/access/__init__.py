"""Access: who may join a swarm, and the file in which a served run remembers that.

Knows certificates and SQLite. Imports no other room of the coordinator.
"""
