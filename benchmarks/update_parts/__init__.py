"""Parts of the benchmark of updates."""
