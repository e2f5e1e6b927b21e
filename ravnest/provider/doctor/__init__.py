"""Doctor: what `ravnest doctor` examines, and what it concludes.

May import `membership` and `machine`.
"""
