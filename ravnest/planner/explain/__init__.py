"""Explain: the reasons of a plan, and the gain of a change to the swarm.

May know the plan and the search.
"""
