"""Forward and backward passes of one stage: version policies, mixed precision, and the split backward.

May know the settings, the weights and the finite checks. Knows nothing of optimizers, updates or other stages.
"""
