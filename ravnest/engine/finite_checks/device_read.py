"""Asynchronous read of one number from a device.

A blocking read from a GPU waits for all work submitted before it. This module starts the read directly after the
operation that computes the number and takes the result later, so that the GPU's queue does not run empty.
"""

from collections.abc import Callable

import torch


def start_reading(number: torch.Tensor) -> Callable[[], float]:
    """Starts the read; the returned function waits for the number and returns it."""
    if number.device.type != "cuda":
        return lambda: float(number)
    host_copy = torch.empty((), dtype=number.dtype, pin_memory=True)
    host_copy.copy_(number.detach(), non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(number.device))

    def wait_and_read() -> float:
        arrived.synchronize()
        return float(host_copy)

    return wait_and_read
