"""Rings: this provider's part in averaging: snapshots, attempts, and lines to the other owners of its rings.

May know `replicas` and the rooms below it. The arithmetic is in `ravnest.averaging`.
"""
