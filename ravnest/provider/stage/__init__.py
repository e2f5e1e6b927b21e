"""Stage: one stage that this provider hosts, from the order to its end.

May import every other room of the provider but `doctor`.
"""
