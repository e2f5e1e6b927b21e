"""Benchmarks: `python -m benchmarks.NAME [--quick] [--json FILE]`; figures over time are in RESULTS.md."""
