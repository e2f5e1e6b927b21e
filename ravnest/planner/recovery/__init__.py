"""Recovery: what to do when a provider is lost, joins or becomes slow.

May import `search`.
"""
