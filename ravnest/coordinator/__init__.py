"""Coordinator: the requester's side of a run. It admits providers, plans, feeds data and keeps the run directory.

Knows every other package except the provider. Each of its rooms says what it knows of the others.
"""
