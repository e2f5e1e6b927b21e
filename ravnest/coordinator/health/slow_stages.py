"""Detector for stages that have become permanently slow, for example on a laptop that throttles.

A slow machine sends heartbeats and works, and its whole cluster waits for it. The usual time is learned from each
stage itself, as for links (slow_links.py). A stage is slow when it takes several times its usual time, and at least as
long as any other stage of its cluster, for a while. Where a standby would make the cluster clearly faster, the
coordinator drops the slow provider as if it were lost, and the provider joins again (deploy/replace_slow.py). Pure
functions and values: the caller passes the times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SLOW: Final = 3.0
"""Times what is usual for it, and times what the next slowest of its cluster takes."""
LASTING_SECONDS: Final = 20.0
"""How long that must be so: what else a machine does for a moment is its own business."""
GAIN: Final = 1.5
"""How much faster its cluster must be with another in its place."""
LEARNING: Final = 3
"""Windows until what is usual is known."""
WINDOW_SECONDS: Final = 5.0
MIN_PIECES: Final = 3
"""A window is so long, and has at least so many microbatches in it."""
_RISE: Final = 1 / 32
_FALL: Final = 1 / 2
"""How soon what is usual follows a window above and below it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage has done since it began, as it reports."""

    pieces: int
    """Microbatches that were there and back."""
    seconds: float
    """That it computed for them."""


class StagePace:
    """How long one stage takes for a microbatch."""

    def __init__(self) -> None:
        self.usual_seconds = 0.0
        self.seconds = 0.0
        """Of late."""
        self._windows = 0
        self._at: float | None = None
        self._work = Work(0, 0.0)
        self._slow_since: float | None = None

    def take(self, work: Work, now: float) -> None:
        """What it has done by now; of one that began anew, less than before."""
        if self._at is None or work.pieces < self._work.pieces or work.seconds < self._work.seconds:
            self._at, self._work = now, work
            return
        pieces = work.pieces - self._work.pieces
        if now - self._at < WINDOW_SECONDS or pieces < MIN_PIECES:
            return
        self.seconds = (work.seconds - self._work.seconds) / pieces
        since, self._at, self._work = self._at, now, work
        self._windows += 1
        if self._windows <= LEARNING:
            self.usual_seconds = self.seconds if self._windows == 1 else min(self.usual_seconds, self.seconds)
        elif self.seconds <= SLOW * self.usual_seconds:
            off = self.seconds - self.usual_seconds
            self.usual_seconds += (_RISE if off > 0 else _FALL) * off
        if self._windows <= LEARNING or self.seconds <= SLOW * self.usual_seconds:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = since

    def slow_for(self, now: float) -> float:
        """How many seconds it has been slow for."""
        return 0.0 if self._slow_since is None else now - self._slow_since


def who_is_slow(order: Sequence[str], paces: Mapping[str, StagePace], now: float) -> tuple[str, str] | None:
    """Whom of a cluster the others wait for because it has become slow, and why that is said; None where nobody."""
    known = {node: paces[node] for node in order if node in paces and paces[node].seconds > 0}
    if len(known) < len(order):
        return None
    slowest = max(known, key=lambda node: known[node].seconds)
    pace = known[slowest]
    others = max((known[node].seconds for node in known if node != slowest), default=0.0)
    if pace.slow_for(now) < LASTING_SECONDS or pace.seconds < SLOW * others:
        return None
    reason = (
        f"{slowest} has taken {pace.seconds * 1e3:.0f} ms for a microbatch for {pace.slow_for(now):.0f} s, where "
        f"{pace.usual_seconds * 1e3:.0f} ms are usual for it and no other of its cluster takes more than "
        f"{others * 1e3:.0f} ms"
    )
    return slowest, reason


def worth_replacing(seconds: float, samples: float, rates: Mapping[str, float]) -> str:
    """Why a stage that takes so long for a microbatch of so many samples is given to another: who would make its
    cluster faster, and by how much, from the rates that it would have with each; empty where nobody would."""
    best = max(rates, key=lambda name: rates[name], default=None)
    if best is None or seconds <= 0:
        return ""
    now = samples / seconds
    if rates[best] < GAIN * now:
        return ""
    return f"with {best} in its place there would be {rates[best]:.3g} samples/s instead of {now:.3g}"
