"""Launch: how a run is started, shown and interrupted, as an embedded swarm or a served one.

Knows every other room of the coordinator. No other room imports this one.
"""
