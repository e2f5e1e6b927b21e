"""Averaging between clusters: rings, the reduce, outer optimizers and the guards. No sockets, no clock."""
