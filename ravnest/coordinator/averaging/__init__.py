"""Averaging: when a round begins, and the coordinator's messages with the owners of the rings.

May import `run` and below. The decisions of a round are in `ravnest.averaging`.
"""
