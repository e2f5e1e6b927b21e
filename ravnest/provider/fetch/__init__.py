"""Fetch: downloads a stage's graph and weights, from the cache on this disk or from the coordinator.

Knows files and bytes, and nothing of their meaning. May import `machine`.
"""
