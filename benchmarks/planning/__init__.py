"""Parts of the planner's benchmark: random instances, brute force, the paper's rule, an upper bound, and real runs.

May know the planner, and for real runs the command line and the WAN lab.
"""
