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


class MeasuredRate:
    """Rate of one direction of a line, from measurements of connections. The fastest one counts: a slower one shows the
    other end's line."""

    def __init__(self) -> None:
        self._outside = self._nearby = 0.0

    @property
    def bytes_per_second(self) -> float:
        """0 while nothing was measured."""
        # A swarm on one network has no other measurements, and its lines are those of that network.
        return self._outside or self._nearby

    @property
    def leads_outside(self) -> bool:
        """Whether a connection to another network was measured."""
        return self._outside > 0

    def measured(self, bytes_per_second: float, *, is_nearby: bool = False) -> None:
        """A connection was measured.

        `is_nearby`: to a machine on the same network. Such connections do not pass the line to the internet, so they
        count only while no other one was measured.
        """
        if not math.isfinite(bytes_per_second):
            return
        if is_nearby:
            self._nearby = max(self._nearby, bytes_per_second)
        else:
            self._outside = max(self._outside, bytes_per_second)


class UplinkRate:
    """Rate of one line, as far as it is known. The caller serialises the calls."""

    def __init__(self) -> None:
        self._measurements = MeasuredRate()
        self._limit = math.inf
        self._proved = self._proved_nearby = 0.0
        self._observed: deque[float] = deque(maxlen=_RECENT)

    @property
    def bytes_per_second(self) -> float:
        """The rate to go by."""
        learned = statistics.median(self._observed) if self._observed else FIRST_RATE
        return min(max(self._measured or learned, self._proved_rate), self._limit)

    @property
    def _measured(self) -> float:
        return self._measurements.bytes_per_second

    @property
    def leads_outside(self) -> bool:
        """Whether a connection to another network was measured, so that nearby ones do not use this line."""
        return self._measurements.leads_outside

    @property
    def is_measured(self) -> bool:
        return self._measured > 0

    @property
    def reason(self) -> str:
        """How the rate is known, in words."""
        if self.bytes_per_second >= self._limit:
            return "the user's limit"
        if self._proved_rate > self._measured > 0:
            return "seen on its links, more than was measured"
        if self._measured:
            return "measured"
        return "learned from transfers, not measured" if self._observed else "assumed, not measured"

    @property
    def _proved_rate(self) -> float:
        return self._proved if self.leads_outside else max(self._proved, self._proved_nearby)

    def measured(self, bytes_per_second: float, *, is_nearby: bool = False) -> None:
        """A connection was measured; see MeasuredRate."""
        self._measurements.measured(bytes_per_second, is_nearby=is_nearby)

    def proved(self, bytes_per_second: float, *, is_nearby: bool = False) -> None:
        """A frame was delivered at this rate: the line is no slower, though something else may have used it while it
        was measured. `is_nearby` as in `measured`."""
        if not math.isfinite(bytes_per_second):
            return
        if is_nearby:
            self._proved_nearby = max(self._proved_nearby, bytes_per_second)
        else:
            self._proved = max(self._proved, bytes_per_second)

    def limit(self, bytes_per_second: float) -> None:
        """The user allows no more than this."""
        self._limit = bytes_per_second

    def observed(self, size_bytes: int, busy_seconds: float) -> None:
        """A burst was confirmed after this time, round trip excluded. Counts while the line is not measured."""
        if not self._measured and size_bytes > 0 and math.isfinite(busy_seconds):
            self._observed.append(size_bytes / max(busy_seconds, _MIN_SECONDS))
