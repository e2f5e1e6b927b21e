"""Search: the clusters of a plan, the order of the providers in each, and the cuts of the model.

May know the values and the cost model of the planner, not the rings.
"""
