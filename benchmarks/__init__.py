"""Benchmarks: `python -m benchmarks.NAME [--quick] [--json FILE]`; RESULTS.md has the current figures."""
