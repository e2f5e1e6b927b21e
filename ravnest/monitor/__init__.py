"""Monitor: events, metrics, summary, trace, display and report of a run.

Knows the run directory and plain values. Only `export` uses torch; nothing uses the network.
"""
