"""In flight: how many microbatches a cluster works on at a time, planned and then measured.

May import the values and the cost model of the planner.
"""
