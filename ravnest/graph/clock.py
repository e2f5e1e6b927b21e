"""Clock for timing computation, which other programs on the same machine disturb as little as possible."""

import time
from collections.abc import Callable

import torch


def work_clock() -> Callable[[], float]:
    """The processor time of this thread if torch computes with one thread, otherwise the elapsed time: several threads
    wait for one another, so the processor time of one of them means little."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
