"""Rate limit of measurements, for each caller."""

from collections import deque
from collections.abc import Callable
from typing import Final

CALLS_PER_MINUTE: Final = 6
"""Measurements of one caller. With `measuring.MAX_BYTES` each, this limits the traffic that it can cause here."""


class CallRate:
    """Counts the measurements of each caller within the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: dict[str, deque[float]] = {}

    def take(self, caller: str) -> tuple[bool, str]:
        """Whether this caller may measure now, which is counted then, and the reason."""
        now = self._clock()
        for name, times in list(self._calls.items()):
            while times and times[0] <= now - 60:
                times.popleft()
            if not times:
                del self._calls[name]
        times = self._calls.setdefault(caller, deque())
        if len(times) >= CALLS_PER_MINUTE:
            return False, f"{caller} has measured {len(times)} times within a minute; try again in a minute"
        times.append(now)
        return True, f"{caller} has measured {len(times) - 1} times within a minute"
