"""The time of day that does not jump: for what ends after a while, on a machine whose clock may be set meanwhile."""

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch as they were when it was made, and what has passed since then.

    A clock that is set, by a person or by the network, does not move it; a machine that slept has slept.
    """

    def __init__(self) -> None:
        self._passed = _PASSED
        self._began = time.time() - self._passed()

    def __call__(self) -> float:
        return self._began + self._passed()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_PASSED: Callable[[], float] = _since_boot if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
