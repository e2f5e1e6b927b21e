"""Run: what every deployment of a run works with: context, orders, dispatcher, microbatches in flight, checkpointer.

May import `report`, `health`, `plan` and below.
"""
