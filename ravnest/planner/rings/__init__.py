"""Rings: which providers average which parameters, and in which order.

May import the values and the cost model of the planner, not the search.
"""
