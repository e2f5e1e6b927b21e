"""Parts of benchmarks.homes: home lines, models, swarms in the WAN lab, their figures, kills, and peers."""
