"""Allow-list of operators: which ones a portable graph may name, with which arguments, and how much memory each takes.

Knows torch alone, and nothing of graphs: the modules check one call of one operator.
"""
