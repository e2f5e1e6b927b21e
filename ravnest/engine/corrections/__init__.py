"""Corrections of staleness: strategies behind one interface (correction.py), one file each.

May know the optimizers of torch, the optimizer specification, and the blocks and packed moments of `weights/`. Knows
nothing of stages.
"""
