"""Trace collector: checks the spans that stages report, bounds them, and puts them on one time axis: the run's trace.

Providers are not trusted, so spans with impossible values are dropped. The trace keeps two windows of each stage: the
first one, and the latest one that is mostly complete (see engine/telemetry/trace_windows.py).
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ravnest.engine.telemetry.spans import WAIT_LIMIT, WAIT_NOTHING
from ravnest.engine.telemetry.trace_windows import window_of, window_size
from ravnest.errors import RunError
from ravnest.monitor.clock_alignment import Crossing, align, offset_of
from ravnest.monitor.trace import BUSY_KINDS, MAX_SPANS, Trace, TraceSpan, TraceStage, after
from ravnest.net.v1 import control_pb2
from ravnest.planner.plan import StagePlan

_DETAILS: Final = {
    **dict.fromkeys(BUSY_KINDS, ("",)),
    "wait": (WAIT_LIMIT, WAIT_NOTHING),
    "send": ("forward", "backward"),
    "receive": ("forward", "backward"),
}
_SLACK_SECONDS: Final = 60.0
"""How far a provider's clock may be ahead of the coordinator's before its spans are impossible."""
_MAX_NUMBER: Final = 2**53
_SPANS_A_MICROBATCH: Final = 16
_WRITE_SECONDS: Final = 10.0
_WRITE_SHARE: Final = 0.01
"""Largest share of the time that goes into writing the trace while the run goes on."""


class Tracing:
    """Collects the spans of one session. `write` may run on any thread, all other methods on the network's loop."""

    def __init__(
        self,
        path: Path,
        microbatches: int,
        stages: Sequence[StagePlan],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """For a trace of this many microbatches of each cluster. The file at `path` is kept, as earlier sessions."""
        self._clock = clock
        clusters = len({stage.cluster for stage in stages})
        self._path = path
        self._size = window_size(microbatches * clusters)
        self._started = clock()
        self._stages = {stage.node: _Stage(stage) for stage in stages}
        # Two windows of each stage are written.
        self._most = max(_SPANS_A_MICROBATCH, min(_SPANS_A_MICROBATCH * self._size, MAX_SPANS // (2 * len(stages))))
        self._earlier = Trace()
        if path.exists():
            # A damaged file is replaced: nothing in it can be kept.
            with contextlib.suppress(RunError):
                self._earlier = Trace.read(path)
        self._changed = False
        self._written = self._started
        self._pause_seconds = _WRITE_SECONDS

    @property
    def due(self) -> bool:
        """Whether there are new spans and it is time to write them."""
        return self._changed and self._clock() - self._written >= self._pause_seconds

    def take(self, node_id: str, report: control_pb2.Report) -> None:
        """Receives a stage's report and drops its impossible spans."""
        stage = self._stages.get(node_id)
        if stage is None:
            return
        elapsed = self._clock() - self._started
        if math.isfinite(report.seconds) and 0 <= report.seconds <= elapsed + _SLACK_SECONDS:
            # A report is delayed on its way: the fastest one tells best when the stage's clock began.
            stage.origin = min(stage.origin, elapsed - report.seconds)
        for said in report.spans:
            span = _checked(said, elapsed + _SLACK_SECONDS)
            if span is not None:
                stage.add(span, self._size, self._most)
                self._changed = True

    def write(self) -> None:
        """Replaces the file if there are new spans; RunError when the disk refuses."""
        if not self._changed:
            return
        began = self._clock()
        self._changed = False
        after(self._earlier, self.stages()).write(self._path)
        self._written = self._clock()
        self._pause_seconds = max(_WRITE_SECONDS, (self._written - began) / _WRITE_SHARE)

    def stages(self) -> list[TraceStage]:
        """The kept spans of each stage, all on one axis."""
        by_cluster: dict[int, list[_Stage]] = {}
        for stage in self._stages.values():
            by_cluster.setdefault(stage.plan.cluster, []).append(stage)
        found = [made for stages in by_cluster.values() for made in _placed(stages)]
        began = min((span.began for stage in found for span in stage.spans), default=0.0)
        if began >= 0:
            return found
        # Clock errors may put spans before the beginning of the axis.
        return [
            replace(stage, spans=tuple(replace(s, began=s.began - began, ended=s.ended - began) for s in stage.spans))
            for stage in found
        ]


@dataclass
class _Stage:
    plan: StagePlan
    origin: float = math.inf
    """When the stage's clock began, on the coordinator's clock."""
    first: int | None = None
    windows: dict[int, list[TraceSpan]] = field(default_factory=dict)
    """By number: the first window and the two latest."""
    latest: int = 0

    def add(self, span: TraceSpan, size: int, most: int) -> None:
        window: int | None = self.latest
        if span.microbatch >= 0:
            if self.first is None:
                self.first = span.microbatch
            window = window_of(span.microbatch - self.first, size)
        if window is None or (window < self.latest and window not in self.windows):
            return
        spans = self.windows.setdefault(window, [])
        if len(spans) < most:
            spans.append(span)
        self.latest = max(self.latest, window)
        if len(self.windows) > 3:
            del self.windows[sorted(self.windows)[1]]


def _checked(said: control_pb2.Span, max_seconds: float) -> TraceSpan | None:
    began, seconds = said.began_seconds, said.seconds
    if said.detail not in _DETAILS.get(said.kind, ()) or abs(said.microbatch) >= _MAX_NUMBER:
        return None
    # Comparisons with NaN are false.
    if not (0 <= began <= max_seconds and seconds >= 0 and began + seconds <= max_seconds):
        return None
    return TraceSpan(said.kind, said.microbatch, began, began + seconds, said.detail)


def _placed(stages: Sequence[_Stage]) -> list[TraceStage]:
    """The stages of a cluster on one axis. Clocks drift, so their offsets are computed for each window."""
    found: list[list[TraceSpan]] = [[] for _ in stages]
    origins = [0.0 if math.isinf(stage.origin) else stage.origin for stage in stages]
    for window in _kept_windows(stages):
        spans = [tuple(stage.windows.get(window, ())) for stage in stages]
        links = [_between(before, behind) for before, behind in itertools.pairwise(spans)]
        for stage, own, seconds in zip(found, spans, align(links, origins), strict=True):
            stage.extend(replace(span, began=span.began + seconds, ended=span.ended + seconds) for span in own)
    return [
        TraceStage(stage.plan.cluster, stage.plan.stage, stage.plan.role, stage.plan.node, tuple(spans))
        for stage, spans in zip(stages, found, strict=True)
    ]


def _kept_windows(stages: Iterable[_Stage]) -> list[int]:
    """The first window, and the later one with the most updates; the latest of several with as many."""
    # Copied in one step: another thread may be writing while the loop receives reports.
    windows = [window for stage in stages for window in list(stage.windows.items())]
    updates: Counter[int] = Counter()
    for window, spans in windows:
        updates[window] += sum(span.kind == "update" for span in tuple(spans))
    first = updates.pop(0, None)
    later = [max(updates, key=lambda window: (updates[window], window))] if updates else []
    return ([] if first is None else [0]) + later


def _between(before: Iterable[TraceSpan], behind: Iterable[TraceSpan]) -> float | None:
    """The offset between the clocks of two neighbouring stages."""
    here, there = _by_microbatch(before), _by_microbatch(behind)
    return offset_of(
        _crossings(here["send forward"], there["receive forward"]),
        _crossings(there["send backward"], here["receive backward"]),
    )


def _by_microbatch(spans: Iterable[TraceSpan]) -> dict[str, dict[int, float]]:
    """When the sending and the arrival of each microbatch began."""
    rows = ("send forward", "send backward", "receive forward", "receive backward")
    found: dict[str, dict[int, float]] = {row: {} for row in rows}
    for span in spans:
        if span.row in found:
            found[span.row].setdefault(span.microbatch, span.began)
    return found


def _crossings(sent: dict[int, float], arrived: dict[int, float]) -> list[Crossing]:
    return [Crossing(sent[number], arrived[number]) for number in sent.keys() & arrived.keys()]
