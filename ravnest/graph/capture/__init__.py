"""Capture: turns the requester's model, loss and metrics into one portable graph and verifies that both train the same.

Knows the portable graph and torch.export. Runs on the requester's machine only: no provider imports it.
"""
