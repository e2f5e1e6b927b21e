"""Launch: how a run is started, shown and interrupted, as an embedded swarm or a served one.

May know every other room of the coordinator. No other room may import this one.
"""
