"""Report: what the stages say of their work, on its way to the display, the summary, the curves and the trace.

May import `plan` and below. Decides nothing.
"""
