"""Telemetry of one stage: spans, counters, busy time, current activity, and the rule for which microbatches are traced.

May know the schedule and the simulated pace. Knows nothing of stages, messages or of where its spans are sent.
"""
