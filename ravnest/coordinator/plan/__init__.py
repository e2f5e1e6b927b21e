"""Plan: from a job and the measured members of a swarm to the plan that is deployed.

May know `checkpoints` and the rooms below it. Decides with the planner, and sends nothing.
"""
