"""Rings: this provider's part in averaging: snapshots, attempts, and lines to the other owners.

May import `replicas` and below. The arithmetic is in `ravnest.averaging`.
"""
