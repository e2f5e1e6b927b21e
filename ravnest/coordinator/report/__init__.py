"""Report: the stages' reports on their way to the display, the summary, the curves and the trace.

Knows the plan, the clusters and the ledger. Decides nothing. May import `plan` and below.
"""
