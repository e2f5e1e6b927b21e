"""Launch: how a run is started, shown and interrupted, as an embedded swarm or a served one.

Knows every other package of the coordinator. None of them imports this one.
"""
