"""Backoff: growing pauses between the retries of a connection or a transfer.

A peer that was killed is often restarted within seconds, and the whole cluster waits until it is connected again. So
the pauses stay short for a while before they grow to their maximum.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FIRST_BACKOFF_SECONDS: Final = 0.1
SOON_BACKOFF_SECONDS: Final = 0.4
LAST_BACKOFF_SECONDS: Final = 2.0
_SOON_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class BackoffLimits:
    """Length of the pauses between retries."""

    first_seconds: float = FIRST_BACKOFF_SECONDS
    soon_seconds: float = SOON_BACKOFF_SECONDS
    """Longest pause in the first 30 s."""
    last_seconds: float = LAST_BACKOFF_SECONDS
    """Longest pause afterwards."""


class Backoff:
    """Pauses between retries. Each one is twice as long as the one before, up to the limits."""

    def __init__(self, limits: BackoffLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or BackoffLimits()
        self._clock = clock
        self._began = clock()
        self._pause_seconds = 0.0

    @property
    def is_first(self) -> bool:
        """Whether there was no pause yet, since the beginning or the last `reset`."""
        return not self._pause_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Time since the beginning or the last `reset`."""
        return self._clock() - self._began

    def reset(self) -> None:
        """The last try succeeded: begin with the shortest pause again."""
        self._began, self._pause_seconds = self._clock(), 0.0

    def next_seconds(self) -> float:
        """Length of the next pause."""
        limits = self._limits
        longest = limits.soon_seconds if self.elapsed_seconds < _SOON_SECONDS else limits.last_seconds
        self._pause_seconds = limits.first_seconds if self.is_first else min(2 * self._pause_seconds, longest)
        return self._pause_seconds

    async def wait(self) -> None:
        """Wait for the next pause."""
        await asyncio.sleep(self.next_seconds())
