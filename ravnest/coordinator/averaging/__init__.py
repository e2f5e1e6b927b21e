"""Averaging: when a round begins, and the messages between the coordinator and the owners of the rings.

May know `run` and the rooms below it. The decisions of a round are made in `ravnest.averaging`.
"""
