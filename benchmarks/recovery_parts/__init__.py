"""Parts of benchmarks.recovery: its job, its swarm, and the observation of a run directory."""
