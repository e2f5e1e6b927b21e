"""Faults on purpose: a real swarm in the WAN lab, and whatever may happen to its machines. See docs/faults.md."""
