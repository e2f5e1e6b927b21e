"""Asynchronous read of one number from a device.

A plain read from a GPU waits for all work that the GPU was given before it. So the read is started early, right behind
the operation that computes the number, and its result is taken later; meanwhile the GPU has more work in its queue.
"""

from collections.abc import Callable

import torch


def start_reading(number: torch.Tensor) -> Callable[[], float]:
    """Starts the read; the returned function waits for the number and returns it."""
    if number.device.type != "cuda":
        return lambda: float(number)
    here = torch.empty((), dtype=number.dtype, pin_memory=True)
    here.copy_(number.detach(), non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(number.device))

    def answer() -> float:
        arrived.synchronize()
        return float(here)

    return answer
