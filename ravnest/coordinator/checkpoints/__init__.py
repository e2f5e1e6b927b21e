"""Checkpoints: written, read, verified and removed on this disk.

May import `feed` and below. Is handed bytes by whoever hears the stages, and sends nothing.
"""
