"""Links between stages that have become slow: nothing is lost and nobody is gone, and yet somebody should know.

A lossy line or one that somebody else fills shows in how long microbatches are on the way, beyond their stay at the
stages. What is usual is learned from each link itself while it is well. Nothing is decided here: how many are in flight
follows from the same measures, and whoever holds others up is judged elsewhere.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.health.uploads import fills_its_line
from ravnest.net.v1.control_pb2 import Report

SLOW: Final = 2.0
WELL: Final = 1.5
"""Times what is usual: from there on a link is slow, and up to there it is well again."""
MIN_SECONDS: Final = 0.01
"""What nobody minds, whatever is usual."""
LASTING_SECONDS: Final = 1.0
"""How long it must be so before it is told."""
LEARNING: Final = 3
"""Reports until what is usual is known."""
_RISE: Final = 1 / 32
_FALL: Final = 1 / 2
"""How soon what is usual follows a report above and below it: a busy machine makes a link look slower, none faster."""

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Change:
    """A link has become slow, or is well again."""

    slow: bool
    reason: str


class LinkPace:
    """How long microbatches are on the way over one link; times are the caller's."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._reports = 0
        self._slow = False
        self._since: float | None = None
        """When it began to look other than it was told."""

    def take(self, delay_seconds: float, now: float) -> Change | None:
        """What microbatches spent on the way lately; the change that is to be told, if there is one."""
        self._reports += 1
        if self._reports <= LEARNING:
            # The least of these: the first ones travelled while connections were young.
            self._usual = delay_seconds if self._reports == 1 else min(self._usual, delay_seconds)
            return None
        bound = (WELL if self._slow else SLOW) * self._usual + MIN_SECONDS
        if (delay_seconds > bound) == self._slow:
            self._since = None
            if not self._slow:
                self._usual += (_RISE if delay_seconds > self._usual else _FALL) * (delay_seconds - self._usual)
            return None
        self._since = now if self._since is None else self._since
        if now - self._since < LASTING_SECONDS:
            return None
        self._slow, self._since = not self._slow, None
        what = "are on the way for" if self._slow else "are again on the way for only"
        reason = f"microbatches {what} {delay_seconds * 1e3:.0f} ms, where {self._usual * 1e3:.0f} ms are usual"
        return Change(self._slow, reason)

    def skip(self) -> None:
        """What is seen at this moment says nothing of the line."""
        self._since = None


class SlowLinks:
    """Of all links of a run: `link_slow` and `link_well` among its events."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._clock = clock
        self._paces: dict[str, tuple[tuple[str, str], LinkPace]] = {}
        """By who reports it: which link that is, and how it does."""

    def reported(self, node_id: str, report: Report) -> None:
        """What a stage says of its links; that to the next stage has a delay."""
        if fills_its_line(report):
            # Its line is full of that, for a while.
            if node_id in self._paces:
                self._paces[node_id][1].skip()
            return
        for link in report.links:
            # Of microbatches that hardly waited for the line: how many wait for it is our own doing.
            delay = link.delay_seconds
            if not link.next or not 0 < delay < math.inf:
                continue
            # Another deployment may cut the model elsewhere, and send other amounts over the same line.
            which = report.deployment, link.node
            known, pace = self._paces.get(node_id, (None, None))
            if pace is None or known != which:
                pace = LinkPace()
                self._paces[node_id] = which, pace
            if change := pace.take(delay, self._clock()):
                kind = "link_slow" if change.slow else "link_well"
                self._emit(kind, f"{node_id} to {link.node}: {change.reason}", provider=node_id, to=link.node)
