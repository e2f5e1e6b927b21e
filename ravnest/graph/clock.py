"""The clock by which computation is timed, so that a machine that others use for a moment is not called slow."""

import time
from collections.abc import Callable

import torch


def work_clock() -> Callable[[], float]:
    """Counts the time that this thread got of the processor, where it computes alone.

    With several threads it is the time that passes: they wait for one another, and what one of them got says little.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
