"""Delay of a link: how long microbatches travel to the next stage and back, without a common clock.

With each gradient the later stage sends how long it had the microbatch, by its own clock. The earlier stage knows by
its own clock how long the microbatch was away. The difference is the delay both ways: packing, latency, unpacking, and
waiting behind other frames. So the low quantile of recent delays is the latency of the way.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

RECENT: Final = 32
RECENT_SECONDS: Final = 2.0
MIN_DELAYS: Final = 8
"""Delays that count: the last RECENT ones, and no older than RECENT_SECONDS unless fewer than MIN_DELAYS remain."""

LOW_SHARE: Final = 0.1
_MAX_AWAITED: Final = 4096
_MAX_STAY_MICROS: Final = 10**12
"""More than a week. No microbatch stays that long, so a longer time is ignored."""

Clock = Callable[[], float]


class ResidenceTimes:
    """At the later stage: how long each microbatch has been here. Any thread may use it."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._arrived: dict[int, float] = {}

    def __len__(self) -> int:
        """Microbatches that are here."""
        return len(self._arrived)

    def arrived(self, microbatch: int) -> None:
        """The activations of this microbatch have arrived."""
        self._arrived[microbatch] = self._clock()
        if len(self._arrived) > _MAX_AWAITED:
            # The oldest entry belongs to a microbatch whose gradients were never sent back.
            self._arrived.pop(next(iter(self._arrived)), None)

    def left_micros(self, microbatch: int) -> int:
        """The gradients go back now: microseconds since the activations arrived; 0 if they never did."""
        arrived = self._arrived.pop(microbatch, None)
        return 0 if arrived is None else max(1, round(1e6 * (self._clock() - arrived)))


class LinkDelay:
    """At the earlier stage: the delay of each microbatch there and back. Any thread may call `handed_over`, one thread
    the other methods."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._away: dict[int, float] = {}
        self._delays: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def handed_over(self, microbatch: int) -> None:
        """The activations of this microbatch are on their way."""
        self._away[microbatch] = self._clock()

    def returned(self, microbatch: int, stay_micros: int) -> None:
        """The gradients are back, after this stay at the other end; 0: unknown."""
        began, now = self._away.pop(microbatch, None), self._clock()
        if began is not None and 0 < stay_micros < _MAX_STAY_MICROS:
            # If a peer exaggerates its stay, its link looks short, but no shorter than zero.
            self._delays.append((now, max(0.0, now - began - stay_micros / 1e6)))

    @property
    def low_seconds(self) -> float:
        """Delay of the microbatches that hardly waited; 0 while nothing is known."""
        recent = self._clock() - RECENT_SECONDS
        counted = [delay for at, delay in self._delays if at >= recent]
        if len(counted) < MIN_DELAYS:
            counted = [delay for _, delay in list(self._delays)[-MIN_DELAYS:]]
        counted.sort()
        return counted[int(LOW_SHARE * (len(counted) - 1) + 0.5)] if counted else 0.0
