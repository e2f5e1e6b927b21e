"""Deploy: gives the stages of a plan to providers, and redeploys when a provider is lost, joins, leaves or is slow.

Knows every other package of the coordinator but `launch`, and may import them. `coordinator.py` and `intake.py`, which
stand above it, pass on the providers' messages.
"""
