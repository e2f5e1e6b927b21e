"""Watch for a run that completes nothing: it tells the user why, by an event, a message and the live display.

The event `standstill` is emitted when the standstill has lasted for a while, and again when it has lasted twice as long
or has another cause; `went_on` ends it. Nothing is decided here: `stalls` and `lease` decide which provider to give up.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.health.standstill import (
    ClusterNow,
    CompletionPace,
    RunNow,
    StageNow,
    Standstill,
    StateSent,
    explain,
)
from ravnest.coordinator.health.watchdog import Emit
from ravnest.engine.telemetry.activity import Missing, MissingKind
from ravnest.monitor.trace import BUSY_KINDS
from ravnest.net.v1.control_pb2 import Report

_LOOK_SECONDS: Final = 1.0
_AGAIN_TIMES: Final = 2.0
_KINDS: Final = frozenset({*BUSY_KINDS, "wait"})
_WHATS: Final[Mapping[str, MissingKind]] = {"feed": "feed", "forward": "forward", "gradient": "gradient"}
_MAX_MISSING: Final = 8
_MAX_LINKS: Final = 2
"""A stage has a link to the stage before and one to the stage after. A leaf that looks rows up counts as the stage
before the root."""
_MAX_SECONDS: Final = 1e9


class StandstillWatch:
    """Watch of one run. All methods run on the network's event loop; times are of the clock `time.monotonic`."""

    def __init__(
        self,
        emit: Emit,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` shows the user a message."""
        self.text = ""
        """Line for the display; empty while the run goes on."""
        self._emit = emit
        self._say = say
        self._clock = clock
        self._pace = CompletionPace()
        self._completed_at: float | None = None
        self._moved_at = clock()
        self._looked_at = -math.inf
        self._told_after: float | None = None
        """Duration of the standstill at its last event; None before the first."""
        self._culprits: tuple[str, ...] = ()

    @property
    def patience_seconds(self) -> float:
        """Time without a completed microbatch after which the user is told: a multiple of the usual time."""
        return self._pace.patience_seconds

    def completed(self) -> None:
        """A microbatch has been completed, in training or in evaluation."""
        now = self._clock()
        if self._completed_at is not None:
            self._pace = self._pace.after(now - self._completed_at)
        self._completed_at = now
        self.moved()

    def moved(self) -> None:
        """Something else is done that the run has waited for: a checkpoint, a deployment, another phase."""
        now = self._clock()
        if self._told_after is not None:
            seconds = now - self._moved_at
            self._emit("went_on", f"went on after {seconds:.0f} s", seconds=seconds)
            self._say(f"went on after {seconds:.0f} s")
        self._moved_at, self._told_after, self._culprits, self.text = now, None, (), ""

    def look(self, run_now: Callable[[], RunNow | None]) -> None:
        """Explains the standstill when it is due. To be called several times a second.

        `run_now` returns the present state of the run, or None while it is not watched.
        """
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        seconds = now - self._moved_at
        run = run_now() if seconds >= self._pace.patience_seconds else None
        if run is None:
            self.text = ""
            return
        found = explain(run)
        self.text = f"nothing completed for {seconds:.0f} s: {found.reason}"
        if self._is_due(found, seconds):
            self._told_after, self._culprits = seconds, found.culprits
            self._emit("standstill", self.text, seconds=seconds, waits_for=list(found.culprits))
            self._say(self.text)

    def _is_due(self, found: Standstill, seconds: float) -> bool:
        told = self._told_after
        if told is None or seconds >= _AGAIN_TIMES * told:
            return True
        return found.culprits != self._culprits and seconds - told >= self._pace.patience_seconds


def cluster_now(cluster: ClusterRun, reports: Mapping[str, Report], silent_seconds: Mapping[str, float]) -> ClusterNow:
    """A cluster as its stages last reported, each this many seconds ago."""
    stages = (stage_now(node, reports.get(node), silent_seconds.get(node, 0.0)) for node in cluster.nodes)
    under_way = (*cluster.open, *sorted(cluster.again), *cluster.evaluating)
    return ClusterNow(cluster.id, tuple(stages), under_way, cluster.reason if cluster.is_forming else "")


def stage_now(node: str, report: Report | None, silent_seconds: float) -> StageNow:
    """A stage as it last reported, `silent_seconds` ago. A provider may say anything."""
    if report is None:
        return StageNow(node, silent_seconds)
    activity = report.activity
    sent = [each for each in report.transfers if each.kind != "replica"]
    return StageNow(
        node=node,
        silent_seconds=max(0.0, silent_seconds),
        kind=activity.kind if activity.kind in _KINDS else "wait",
        microbatch=activity.microbatch,
        seconds=_seconds(activity.seconds) + silent_seconds,
        missing=_missing(report),
        sends=StateSent(sent[0].done_bytes, sent[0].total_bytes, _seconds(sent[0].still_seconds)) if sent else None,
        unconfirmed=tuple((link.node, link.unconfirmed) for link in report.links[:_MAX_LINKS]),
    )


def _missing(report: Report) -> tuple[Missing, ...]:
    told: Sequence[Missing] = [
        Missing(_WHATS[each.what], each.microbatch, each.count)
        for each in report.activity.missing[:_MAX_MISSING]
        if each.what in _WHATS
    ]
    return tuple(told)


def _seconds(seconds: float) -> float:
    return seconds if 0 <= seconds < _MAX_SECONDS else 0.0
