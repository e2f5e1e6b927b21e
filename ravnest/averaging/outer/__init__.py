"""Outer optimizers: what a ring makes of the mean difference of its members. One per file."""
