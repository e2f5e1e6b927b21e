"""Fuzzer of graphs: random lists of allowed operators with hostile arguments, run forward and backward."""
