"""Plan: from a job and the measured members of a swarm to the plan that is deployed.

Decides with the planner and sends nothing. May import `checkpoints` and below.
"""
