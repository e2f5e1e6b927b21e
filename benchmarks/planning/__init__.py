"""What the benchmark of the planner compares with: random instances, brute force, and the paper's rule."""
