"""Replicas: which copies of the stages' state exist, who holds them, and how they reach a stage.

May import `run` and below.
"""
