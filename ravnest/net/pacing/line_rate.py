"""Rate of a machine's uplink: measured when the machine joins, otherwise learned from transfers of state."""

import math
import statistics
from collections import deque
from typing import Final

FIRST_RATE: Final = 1e6
"""Bytes per second assumed of a line of which nothing is known yet: 8 Mbit/s, a slow home line."""
_RECENT: Final = 9
_MIN_SECONDS: Final = 1e-3
"""A burst that is confirmed faster says only that the line is fast."""


class UplinkRate:
    """Rate of one line, as far as it is known. The caller serialises the calls."""

    def __init__(self) -> None:
        self._measured = 0.0
        self._limit = math.inf
        self._proved = 0.0
        self._observed: deque[float] = deque(maxlen=_RECENT)

    @property
    def bytes_per_second(self) -> float:
        """The rate to go by."""
        learned = statistics.median(self._observed) if self._observed else FIRST_RATE
        return min(max(self._measured or learned, self._proved), self._limit)

    @property
    def is_measured(self) -> bool:
        return self._measured > 0

    @property
    def reason(self) -> str:
        """How the rate is known, in words."""
        if self.bytes_per_second >= self._limit:
            return "the user's limit"
        if self._proved > self._measured > 0:
            return "seen on its links, more than was measured"
        if self._measured:
            return "measured"
        return "learned from transfers, not measured" if self._observed else "assumed, not measured"

    def measured(self, bytes_per_second: float) -> None:
        """A connection was measured. The fastest one counts: a slower one shows the other end's line."""
        if math.isfinite(bytes_per_second):
            self._measured = max(self._measured, bytes_per_second)

    def proved(self, bytes_per_second: float) -> None:
        """A frame was delivered at this rate: the line is no slower, though something else may have used it while it
        was measured."""
        if math.isfinite(bytes_per_second):
            self._proved = max(self._proved, bytes_per_second)

    def limit(self, bytes_per_second: float) -> None:
        """The user allows no more than this."""
        self._limit = bytes_per_second

    def observed(self, size_bytes: int, busy_seconds: float) -> None:
        """A burst was confirmed after this time, round trip excluded. Counts while the line is not measured."""
        if not self._measured and size_bytes > 0 and math.isfinite(busy_seconds):
            self._observed.append(size_bytes / max(busy_seconds, _MIN_SECONDS))
