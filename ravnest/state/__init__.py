"""Coded state: a stage's state, which is a safetensors file on the disk, as fewer bytes on a line.

Knows the graph's weights and the codecs. Knows nothing of the network, of disks or of who sends what to whom.
"""
