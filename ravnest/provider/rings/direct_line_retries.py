"""When a direct line to another owner is tried: at first, and after it failed in a later round.

Lines fail for a while (a machine slept, a router was restarted) or for good (a firewall), and nobody can tell which. A
try that fails costs a round a moment, a line that breaks in the middle costs it an attempt. So after each failure the
next try comes later. Whether to try is decided once a round: pieces of one attempt must not overtake each other.
"""

import time
from collections.abc import Callable
from typing import Final

FIRST_PAUSE_SECONDS: Final = 10.0
LAST_PAUSE_SECONDS: Final = 600.0


class DirectLineRetries:
    """Of one line to one owner. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided = -1
        """The last round for which it was decided."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next = clock()

    def is_due(self, round: int) -> bool:
        """Whether a line that is not there is to be dialled for this round; only once for each."""
        if round <= self._decided:
            return False
        self._decided = round
        return self._clock() >= self._next

    def failed(self, round: int) -> None:
        """The line could not be had for this round, or broke in it."""
        self._decided = max(self._decided, round)
        self._next = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)

    def carried(self, round: int) -> None:
        """The line took a piece of this round: if it was not dialled for that, it has outlived a whole round."""
        if round > self._decided:
            self._decided, self._pause_seconds = round, FIRST_PAUSE_SECONDS
