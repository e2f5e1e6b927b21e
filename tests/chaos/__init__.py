"""Chaos tests: faults injected into a real swarm in the WAN lab. See docs/faults.md."""
