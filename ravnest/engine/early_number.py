"""Reading one number off a device without waiting for what was begun after it.

Whoever asks a GPU for a number waits for all work that it was given before the question. So the question is asked
early, right behind what computes the number, and the answer is taken later: meanwhile the GPU has more to do.
"""

from collections.abc import Callable

import torch


def asked_for(number: torch.Tensor) -> Callable[[], float]:
    """What gives the number, once it is there."""
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
