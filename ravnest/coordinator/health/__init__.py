"""Health: which provider is silent, stalled, slow or wrong, and why nothing is completed.

Judges, and leaves what follows to `deploy`. May import `plan` and below.
"""
