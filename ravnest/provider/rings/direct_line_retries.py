"""Retry policy with backoff for a direct line to another owner.

Lines fail for a while (a machine slept, a router was restarted) or for good (a firewall), and a provider cannot tell
which. A failed retry delays a round by a moment, and a line that breaks in the middle costs it an attempt. So the pause
before a retry doubles after each failure. The decision is made once per round, because pieces of one attempt must not
overtake each other on two lines.
"""

import time
from collections.abc import Callable
from typing import Final

FIRST_PAUSE_SECONDS: Final = 10.0
LAST_PAUSE_SECONDS: Final = 600.0


class DirectLineRetries:
    """The retries of one line. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided = -1
        """The last round with a decision."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next = clock()

    def is_due(self, round: int) -> bool:
        """Whether to dial the line for this round; True at most once per round."""
        if round <= self._decided:
            return False
        self._decided = round
        return self._clock() >= self._next

    def failed(self, round: int) -> None:
        """Dialling failed in this round, or the line broke."""
        self._decided = max(self._decided, round)
        self._next = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)

    def carried(self, round: int) -> None:
        """The line carried a piece in this round. If it was dialled for an earlier round, its failures are
        forgotten."""
        if round > self._decided:
            self._decided, self._pause_seconds = round, FIRST_PAUSE_SECONDS
