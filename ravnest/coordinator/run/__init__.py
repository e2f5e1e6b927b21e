"""Run: the shared context of a run, and the parts that serve all its deployments, such as the dispatcher.

Knows the plan, the clusters, the ledger and the connected providers. Does not decide which provider gets a stage:
`deploy` does. May import `report`, `health`, `plan` and below.
"""
