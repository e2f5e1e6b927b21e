"""Search: which providers form which clusters, in which order, and where each model is cut.

May import the values and the cost model of the planner.
"""
