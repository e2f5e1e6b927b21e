"""Codecs: float32 values as fewer bytes on the wire, for parameters between clusters and for activations.

May know torch and the errors. Knows nothing of the network, of frames or of stages.
"""
