"""What benchmarks.recovery is made of."""
