"""Report: the stages' reports on their way to the display, the summary, the curves and the trace.

Knows `plan` and below. Decides nothing.
"""
