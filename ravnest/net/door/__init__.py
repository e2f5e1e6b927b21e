"""Door: limits on the connections of callers that have not proved their identity.

Knows sockets and file descriptors. Imports no other room of `net`.
"""
