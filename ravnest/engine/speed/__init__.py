"""Speed: how fast a device computes: measured, used to correct a profile, and pretended for tests.

May import the rest of the engine.
"""
