"""Detector for links between stages that have become slow: it emits the events `link_slow` and `link_well`.

Lost packets, or other traffic on the line, show in the time that microbatches spend on the way, beyond their time in
the stages. The usual time is learned from each link itself while it is well. The coordinator decides nothing by these
events. They tell the user why a run is slower while no stage is; the number of microbatches in flight follows the same
measurements (run/in_flight.py), and `stalls` judges a link that nothing passes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ravnest.coordinator.health.uploads import fills_its_line
from ravnest.coordinator.health.usual_time import UsualTime
from ravnest.coordinator.health.watchdog import Emit
from ravnest.net.v1.control_pb2 import Report

SLOW: Final = 2.0
"""A link is slow from this multiple of its usual delay."""
WELL: Final = 1.5
"""A slow link is well again up to this multiple."""
MIN_SECONDS: Final = 0.01
"""Added to both multiples, because a smaller difference never matters."""
LASTING_SECONDS: Final = 1.0
"""Minimum time that a link must be slow, or well again, before the event."""


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A link has become slow, or is well again."""

    slow: bool
    reason: str


class LinkPace:
    """Delay of one link: the time that microbatches spend on the way. The caller reads the clock."""

    def __init__(self) -> None:
        self._usual = UsualTime()
        self._slow = False
        self._since: float | None = None
        """Since when the link contradicts its last event; None while it does not."""

    def take(self, delay_seconds: float, now: float) -> LinkChange | None:
        """Takes the latest delay; the change of the link's state, if there is one."""
        if not self._usual.is_known:
            self._usual.take(delay_seconds)
            return None
        bound = (WELL if self._slow else SLOW) * self._usual.seconds + MIN_SECONDS
        if (delay_seconds > bound) == self._slow:
            self._since = None
            if not self._slow:
                self._usual.take(delay_seconds)
            return None
        self._since = now if self._since is None else self._since
        if now - self._since < LASTING_SECONDS:
            return None
        self._slow, self._since = not self._slow, None
        what = "take" if self._slow else "take only"
        reason = (
            f"microbatches {what} {delay_seconds * 1e3:.0f} ms on the way, usually {self._usual.seconds * 1e3:.0f} ms"
        )
        return LinkChange(self._slow, reason)

    def skip(self) -> None:
        """The present delay says nothing about the link."""
        self._since = None


class SlowLinks:
    """The links of one run."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._clock = clock
        self._paces: dict[str, tuple[tuple[str, str], LinkPace]] = {}
        """By the stage that reports it: the deployment and the other end of the link, and its delay."""

    def reported(self, node_id: str, report: Report) -> None:
        """A stage reports its links; only the one to the next stage has a delay."""
        if fills_its_line(report):
            if node_id in self._paces:
                self._paces[node_id][1].skip()
            return
        for link in report.links:
            # The delay of microbatches that hardly queued: the coordinator itself decides how many queue.
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
