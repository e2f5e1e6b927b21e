"""In flight: the number of microbatches that a cluster works on at a time, planned and then controlled.

May know the values and the cost model of the planner, not the search.
"""
