"""Machine: what this machine has and how fast it is: device, memory, cores, speed.

Imports no other room of the provider. Knows nothing of the network.
"""
