"""Foreground traffic of a process: recent bytes per second, and bytes that a connection has not written yet."""

import math
from collections.abc import Callable
from typing import Final, Protocol

MEMORY_SECONDS: Final = 5.0
"""Time constant of the average: several microbatches on a slow line."""


class Foreground(Protocol):
    """Hears of the frames of a link that others wait for. Any thread may call it."""

    def queued(self, size_bytes: int) -> None:
        """These bytes wait to be written."""

    def written(self, size_bytes: int) -> None:
        """The connection has taken these bytes."""

    def delivered(self, size_bytes: int, seconds: float) -> None:
        """A large frame was confirmed after this time: the line is at least so fast."""

    def dropped(self, size_bytes: int) -> None:
        """The connection broke before it took these bytes."""


class RecentRate:
    """Bytes per second, averaged over the last seconds with decreasing weight."""

    def __init__(self, clock: Callable[[], float], memory_seconds: float = MEMORY_SECONDS) -> None:
        self._clock = clock
        self._memory_seconds = memory_seconds
        self._bytes_per_second = 0.0
        self._at = clock()

    @property
    def bytes_per_second(self) -> float:
        self._fade()
        return self._bytes_per_second

    def add(self, size_bytes: int) -> None:
        self._fade()
        self._bytes_per_second += size_bytes / self._memory_seconds

    def _fade(self) -> None:
        now = self._clock()
        self._bytes_per_second *= math.exp((self._at - now) / self._memory_seconds)
        self._at = now
