"""Codecs: float32 values as fewer bytes on the wire, for parameters between clusters and for activations."""
