"""Clock for expiry times that does not jump when the machine's clock is set."""

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch: the machine's time at creation plus the time that has passed since, sleep included."""

    def __init__(self) -> None:
        self._passed = _PASSED
        self._began = time.time() - self._passed()

    def __call__(self) -> float:
        return self._began + self._passed()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_PASSED: Callable[[], float] = _since_boot if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
