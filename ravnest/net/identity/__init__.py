"""Identity: certificates, keys and invites: who a node is, and what it may call.

May import the top of `net` (addresses, connection options). Sends nothing.
"""
