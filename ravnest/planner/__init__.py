"""Planner: from measurements of machines and lines to a plan, with its predicted rate. Pure functions.

May know the graph, the codecs and the settings of a job; nothing of the engine, the network or the coordinator.
"""
