"""Preference among plans that are about equally fast: even memory, even work, little traffic, whole modules, and no
machine that is not worth its place.

Knows the cost model and the cuts of a search.
"""
