"""Replicas: copies of this provider's and other providers' stages, kept on this disk and sent where they are needed.

May import `links`, `fetch` and `machine`.
"""
