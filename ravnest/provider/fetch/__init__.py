"""Fetch: a stage's graph and weights, from the cache on this disk or from the coordinator.

Imports no other room of the provider.
"""
