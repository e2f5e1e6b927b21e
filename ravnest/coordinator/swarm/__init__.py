"""Swarm: the providers that are connected, how they reach one another, and the messages to and from them.

Knows connections and members, but nothing of stages, plans or data. May import `access`.
"""
