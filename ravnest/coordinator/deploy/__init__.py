"""Deploy: gives stages to providers, and gives them again when a provider is lost, joins, leaves or is slow.

May import every room of the coordinator but `launch`.
"""
