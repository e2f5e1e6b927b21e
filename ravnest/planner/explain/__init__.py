"""Explain: the reasons of a plan, and what one change to the swarm would bring.

May import `recovery` and `search`.
"""
