"""Recovery: decisions when a provider is lost, joins or becomes slow.

May know the plan and the search.
"""
