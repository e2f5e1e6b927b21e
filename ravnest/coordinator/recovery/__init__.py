"""Recovery: keeps a deployed run complete while providers are lost, fail, become slow, join or leave.

May know every room of the coordinator but `launch`: it decides with the planner, and carries decisions out with
`deploy`.
"""
