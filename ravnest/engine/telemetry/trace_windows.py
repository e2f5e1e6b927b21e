"""Which microbatches of a run are traced: a pure rule by their number, the same at every stage and the coordinator.

A window at the beginning, and windows that begin after 2, 4, 8, … times as many microbatches as a window has: a long
run shows how it goes now as well as how it began, and is traced ever more seldom.
"""


def window_size(microbatches: int) -> int:
    """How many microbatches a window has where so many are to be in the trace: the first window and the latest."""
    return (microbatches + 1) // 2


def window_of(offset: int, size: int) -> int | None:
    """Which window, counted from 0, has the microbatch that comes `offset` after the run's first; None: it is not
    traced."""
    if offset < size:
        return 0 if offset >= 0 else None
    sizes = offset // size
    found = sizes.bit_length() - 1
    return found if found and sizes == 1 << found else None
