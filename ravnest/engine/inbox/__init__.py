"""Arrival of microbatches: checked against each other, joined from their halves, and never applied twice.

May know the messages, the schedule and the telemetry. Knows nothing of threads that compute or of torch modules.
"""
