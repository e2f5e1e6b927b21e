"""Replicas: copies of this and other providers' stages, kept on this disk and sent where they are needed.

Knows files, links and the names of a stage's tensors. May import `links`, `fetch` and `machine`.
"""
