"""Rings: the providers that average each part of the parameters, and their order.

May know the values and the cost model of the planner, not the search.
"""
