"""Outer optimizers, one per file: each turns the mean difference of a ring's members into the step that all take.

Knows torch and `errors`, and nothing of rings or rounds.
"""
