"""Capture: from the requester's model, loss and metrics to one portable graph, and the proof that it is the same.

Runs on the requester's machine only: no provider imports it.
"""
