"""Machine: the device, memory, cores and speed of this machine.

Imports no other room of the provider. Knows nothing of the network.
"""
