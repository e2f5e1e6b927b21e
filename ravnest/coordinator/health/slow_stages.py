"""Detector for stages that have become permanently slow, for example on a laptop that throttles.

A slow machine sends heartbeats and works, and its whole cluster waits for it. The usual time is learned from each
stage itself, as for links (slow_links.py). A stage is slow when for a while it takes several times its usual time, and
several times as long as any other stage of its cluster. If a standby would make the cluster clearly faster, the
coordinator drops the slow provider as if it were lost, and the provider joins again (recovery/replace_slow.py). Pure
functions and values: the caller passes the times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.health.usual_time import UsualTime

SLOW: Final = 3.0
"""A stage is slow from this multiple of its usual time, and of the time of the next slowest stage of its cluster."""
LASTING_SECONDS: Final = 20.0
"""Minimum time that a stage must be slow: a machine may have something else to do for a moment."""
GAIN: Final = 1.5
"""Minimum gain of the cluster's throughput with another provider."""
WINDOW_SECONDS: Final = 5.0
MIN_PIECES: Final = 3
"""Minimum length of a window, and minimum number of microbatches in it."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a stage has done since it began, as it reports."""

    pieces: int
    """Microbatches whose forward and backward it has computed."""
    seconds: float
    """Time that it computed for them."""


class StagePace:
    """Time that one stage takes for a microbatch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time in the latest window."""
        self._usual = UsualTime()
        self._at: float | None = None
        self._work = Work(0, 0.0)
        self._slow_since: float | None = None

    def take(self, work: Work, now: float) -> None:
        """Takes the latest report; its counters are lower than before when the stage has restarted."""
        if self._at is None or work.pieces < self._work.pieces or work.seconds < self._work.seconds:
            self._at, self._work = now, work
            return
        pieces = work.pieces - self._work.pieces
        if now - self._at < WINDOW_SECONDS or pieces < MIN_PIECES:
            return
        self.seconds = (work.seconds - self._work.seconds) / pieces
        since, self._at, self._work = self._at, now, work
        if not self._usual.is_known or self.seconds <= SLOW * self._usual.seconds:
            self._usual.take(self.seconds)
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = since

    @property
    def usual_seconds(self) -> float:
        return self._usual.seconds

    def slow_for(self, now: float) -> float:
        """Time for which the stage has been slow."""
        return 0.0 if self._slow_since is None else now - self._slow_since


def who_is_slow(order: Sequence[str], paces: Mapping[str, StagePace], now: float) -> tuple[str, str] | None:
    """The provider of a cluster that has become slow and blocks the others, and the reason; None for none."""
    known = {node: paces[node] for node in order if node in paces and paces[node].seconds > 0}
    if len(known) < len(order):
        return None
    slowest = max(known, key=lambda node: known[node].seconds)
    pace = known[slowest]
    others = max((known[node].seconds for node in known if node != slowest), default=0.0)
    if pace.slow_for(now) < LASTING_SECONDS or pace.seconds < SLOW * others:
        return None
    reason = (
        f"{slowest} has taken {pace.seconds * 1e3:.0f} ms for a microbatch for {pace.slow_for(now):.0f} s (usually "
        f"{pace.usual_seconds * 1e3:.0f} ms; no other of its cluster takes more than {others * 1e3:.0f} ms)"
    )
    return slowest, reason


def worth_replacing(seconds: float, samples: float, rates: Mapping[str, float]) -> str:
    """Why to replace a stage that takes `seconds` for a microbatch of `samples`: the best standby and its gain; empty
    if no standby is worth it. `rates` are the cluster's samples per second with each standby."""
    best = max(rates, key=lambda name: rates[name], default=None)
    if best is None or seconds <= 0:
        return ""
    now = samples / seconds
    if rates[best] < GAIN * now:
        return ""
    return f"with {best} in its place there would be {rates[best]:.3g} samples/s instead of {now:.3g}"
