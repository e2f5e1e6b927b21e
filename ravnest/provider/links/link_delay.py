"""How long microbatches are on the way to the next stage and back, beyond their stay there; without a common clock.

The later stage says with each gradient how long the microbatch has stayed with it, on its own clock; the earlier one
knows on its own how long it was away. The difference is what both ways took: packing, lines, unpacking, and waiting for
a line that carried others first. So the low end of recent delays tells how long the way is, and the middle how much of
it is waiting.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

RECENT: Final = 32
RECENT_SECONDS: Final = 2.0
LEAST: Final = 8
"""Delays that count: the last RECENT of them, no older than RECENT_SECONDS unless there are fewer than LEAST."""

LOW_SHARE: Final = 0.1
_MAX_AWAITED: Final = 4096
_MAX_STAY_MICROS: Final = 10**12
"""More than a week: nobody's microbatch stays that long, so whoever says so is not believed."""

Clock = Callable[[], float]


class Stays:
    """At the later stage: how long each microbatch has been here. From any thread."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._arrived: dict[int, float] = {}

    def arrived(self, microbatch: int) -> None:
        """Its activations have come."""
        self._arrived[microbatch] = self._clock()
        if len(self._arrived) > _MAX_AWAITED:
            # Of microbatches whose gradients never went back.
            self._arrived.pop(next(iter(self._arrived)), None)

    def left_micros(self, microbatch: int) -> int:
        """Its gradients go back now: after so many microseconds, and 0 for one that never came."""
        arrived = self._arrived.pop(microbatch, None)
        return 0 if arrived is None else max(1, round(1e6 * (self._clock() - arrived)))


class LinkDelay:
    """At the earlier stage: what each microbatch spends on the way there and back. `handed_over` from any thread, the
    rest from one."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._away: dict[int, float] = {}
        self._delays: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def handed_over(self, microbatch: int) -> None:
        """Its activations are on their way."""
        self._away[microbatch] = self._clock()

    def returned(self, microbatch: int, stay_micros: int) -> None:
        """Its gradients are back, after a stay of so long at the other end; 0: not told."""
        began, now = self._away.pop(microbatch, None), self._clock()
        if began is not None and 0 < stay_micros < _MAX_STAY_MICROS:
            # A peer that exaggerates its stay makes its link look short, not shorter than nothing.
            self._delays.append((now, max(0.0, now - began - stay_micros / 1e6)))

    @property
    def low_seconds(self) -> float:
        """What the way took those that hardly waited for a line; 0 while nothing is known."""
        return self._quantile(LOW_SHARE)

    @property
    def median_seconds(self) -> float:
        """What it took the one in the middle."""
        return self._quantile(0.5)

    def _quantile(self, share: float) -> float:
        recent = self._clock() - RECENT_SECONDS
        counted = [delay for at, delay in self._delays if at >= recent]
        if len(counted) < LEAST:
            counted = [delay for _, delay in list(self._delays)[-LEAST:]]
        counted.sort()
        return counted[int(share * (len(counted) - 1) + 0.5)] if counted else 0.0
