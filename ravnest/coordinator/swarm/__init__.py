"""Swarm: the connected providers, how they reach one another, and the messages to and from them.

Knows connections and members, but no stages, plans or data. Does not judge whether a provider is well: `health` does.
May import `access`.
"""
