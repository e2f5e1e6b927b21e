"""What the promises of Ravnest are checked with; `tests.wan` is also used by the benchmarks."""
