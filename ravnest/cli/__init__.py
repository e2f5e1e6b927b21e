"""Command line: one module per command, with `add_parser` and `run`.

Knows the entry point of each command in the other packages, which it imports only when the command runs.
"""
