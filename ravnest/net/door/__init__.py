"""Door: limits on the connections that have not proved who they are.

Imports no other room of `net`.
"""
