"""Allow-list of a portable graph: which operators it may name, with which arguments, and how much they may make."""
