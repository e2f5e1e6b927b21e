"""Values that are not finite (NaN and infinities): checks that refuse them, and the search for their origin.

May know the graph and its program. Knows nothing of stages, workers or messages.
"""
