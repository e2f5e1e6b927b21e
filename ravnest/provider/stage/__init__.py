"""Stage: one stage that this provider hosts, from its deployment to its end.

Knows the engine, the links, the rings and the replicas. May import every other room of the provider except `doctor`.
"""
