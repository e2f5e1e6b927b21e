"""The portable graph: capture, format, operator allow-list, cost profile, partition."""
