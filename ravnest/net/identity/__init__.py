"""Identity: certificates, keys and invites, which tell who a node is and what it may call.

Knows files and cryptography. May import the top of `net` (addresses, connection settings). Sends nothing.
"""
