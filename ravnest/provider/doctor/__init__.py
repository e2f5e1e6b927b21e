"""Doctor: the checks of `ravnest doctor`.

Knows this machine and its invite, and changes nothing. May import `membership` and `machine`.
"""
