"""Links: connections to neighbouring stages, and the coding of tensors for them.

Imports no other room of the provider. Knows frames, and nothing of how a stage uses them.
"""
