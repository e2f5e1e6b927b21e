"""Trace windows: the rule for which microbatches of a run are traced, the same at every stage and the coordinator.

With windows of n microbatches, the first begins at microbatch 0 and the next after 2n, 4n, 8n, … microbatches. The
trace of a long run then shows both its beginning and its recent state, at a bounded cost.
"""


def window_size(microbatches: int) -> int:
    """Length of a window if this many microbatches are to be in the trace, in the first and the latest window."""
    return (microbatches + 1) // 2


def window_of(offset: int, size: int) -> int | None:
    """Index of the window with the microbatch at `offset` from the run's first; None if it is not traced."""
    if offset < size:
        return 0 if offset >= 0 else None
    sizes = offset // size
    found = sizes.bit_length() - 1
    return found if found and sizes == 1 << found else None
