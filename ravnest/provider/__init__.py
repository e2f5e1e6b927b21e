"""Provider: lends a machine to a swarm, joins a coordinator and hosts one stage.

May know the transport, the engine, averaging and portable graphs. Never knows jobs, models or other Python of a
requester.
"""
