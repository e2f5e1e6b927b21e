"""Speed of devices: measured, used to calibrate a cost profile, and simulated for tests.

May know the stage and its passes. Knows nothing of workers, messages or microbatches that arrive.
"""
