"""Links: connections to neighbouring stages, and how tensors travel over them.

Imports no other room of the provider. Knows frames, and nothing of what a stage does with them.
"""
