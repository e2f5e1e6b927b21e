"""Pacing: state goes behind the foreground, within a budget, and all traffic stays below the user's limits.

Knows times and sizes alone: no frames, no connections.
"""
