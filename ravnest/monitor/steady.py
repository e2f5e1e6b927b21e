"""Steady state of a pipeline, found in its trace: the time between filling and draining. Pure functions.

At the edges of the trace, a stage also works on microbatches that were not traced, which would look like idle time.
Between the first backward and the last forward of the traced microbatches, the trace holds everything that the stage
did; and the pipeline is full.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.monitor.trace import BUSY_KINDS, TraceSpan, TraceStage

MIN_MICROBATCHES: Final = 8
"""Microbatches of a meaningful stretch: an earlier stretch with this many is preferred to a later one with fewer."""

_COLD_SHARE: Final = 4
"""Divisor: a quarter of a session's first stretch is skipped as warm-up."""

_GAP_PERIODS: Final = 5
"""A gap of this many microbatch periods means that the trace was interrupted."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Time use of one stage during a stretch."""

    stage: TraceStage
    busy_fraction: float
    waits: Mapping[str, float]
    """Share of the time spent waiting, by reason."""
    mean_seconds: Mapping[str, float]
    """Mean duration of one task, by kind."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time interval of a cluster, on the axis of its trace."""

    began: float
    ended: float
    microbatches: tuple[int, ...]
    """Microbatches that started during the stretch."""
    steady: bool
    """Whether the pipeline was full throughout; otherwise the stretch is the whole last part of the trace."""
    stages: tuple[StageFigures, ...]


def steady_stretch(stages: Sequence[TraceStage]) -> Stretch | None:
    """The latest long stretch with a full pipeline. Without one, the last part of the trace; None without a trace."""
    if not stages or not stages[0].spans:
        return None
    groups = _groups(stages)
    # The first microbatches include the warm-up of every machine.
    groups[0] = groups[0][len(groups[0]) // _COLD_SHARE :]
    stretches = [_stretch(stages, group) for group in groups]
    full = [found for found in stretches if found is not None and found.microbatches]
    if full:
        long = [found for found in full if len(found.microbatches) >= MIN_MICROBATCHES]
        return long[-1] if long else max(full, key=lambda found: len(found.microbatches))
    return _everything(stages)


def last_of(stretch: Stretch, stages: Sequence[TraceStage], max_microbatches: int) -> tuple[float, float]:
    """Start and end of the last part of a stretch, in which at most `max_microbatches` start."""
    if len(stretch.microbatches) <= max_microbatches:
        return stretch.began, stretch.ended
    first = stretch.microbatches[-max_microbatches]
    return next(s.began for s in stages[0].spans if s.kind == "forward" and s.microbatch == first), stretch.ended


def _groups(stages: Sequence[TraceStage]) -> list[list[int]]:
    """Microbatches that every stage has traced completely, in the order in which they started. An evaluation or an
    interruption of the trace starts a new group."""
    begun = [_when(stage, "forward") for stage in stages]
    done = [_when(stage, kind) for stage in stages for kind in ("backward", "update")]
    whole = set(begun[0]).intersection(*begun, *done)
    order = sorted(whole, key=lambda number: begun[0][number].began)
    if len(order) < 2:
        return [order]
    root = sorted((span for span in stages[0].spans if span.row == "compute"), key=lambda span: span.began)
    period = statistics.median(begun[0][b].began - begun[0][a].began for a, b in itertools.pairwise(order))
    breaks = [span.began for span in root if span.kind == "evaluate"]
    ended = root[0].ended
    for span in root:
        if span.began - ended > _GAP_PERIODS * period:
            breaks.append(span.began)
        ended = max(ended, span.ended)
    breaks.sort()
    groups: dict[int, list[int]] = defaultdict(list)
    passed = 0
    for number in order:
        while passed < len(breaks) and breaks[passed] <= begun[0][number].began:
            passed += 1
        groups[passed].append(number)
    return [groups[key] for key in sorted(groups)]


def _stretch(stages: Sequence[TraceStage], group: Sequence[int]) -> Stretch | None:
    if len(group) < 2:
        return None
    began = max(_when(stage, "backward")[group[0]].began for stage in stages)
    ended = min(_when(stage, "forward")[group[-1]].ended for stage in stages)
    if ended <= began:
        # More microbatches were in flight than were traced.
        return None
    return _made(stages, began, ended, group, steady=True)


def _everything(stages: Sequence[TraceStage]) -> Stretch | None:
    group = next((group for group in reversed(_groups(stages)) if group), None)
    spans = [s for stage in stages for s in stage.spans if s.row == "compute" and (not group or s.microbatch in group)]
    if not spans:
        return None
    numbers = group or sorted({s.microbatch for s in spans})
    return _made(stages, min(s.began for s in spans), max(s.ended for s in spans), numbers, steady=False)


def _made(stages: Sequence[TraceStage], began: float, ended: float, group: Sequence[int], *, steady: bool) -> Stretch:
    let_in = _when(stages[0], "forward")
    inside = tuple(n for n in group if n in let_in and began <= let_in[n].began <= ended)
    return Stretch(began, ended, inside, steady, tuple(_figures(stage, began, ended) for stage in stages))


def _figures(stage: TraceStage, began: float, ended: float) -> StageFigures:
    length = ended - began
    spent: dict[tuple[str, str], float] = defaultdict(float)
    took: dict[str, list[float]] = defaultdict(list)
    for span in stage.spans:
        if span.began >= ended or span.ended <= began:
            continue
        inside = min(span.ended, ended) - max(span.began, began)
        spent[span.kind, span.detail] += inside
        if began <= span.began and span.ended <= ended:
            took[span.kind].append(span.ended - span.began)
    busy = sum(seconds for (kind, _), seconds in spent.items() if kind in BUSY_KINDS)
    return StageFigures(
        stage,
        busy / length if length else 0.0,
        {why: seconds / length for (kind, why), seconds in spent.items() if kind == "wait" and length},
        {kind: statistics.fmean(values) for kind, values in took.items()},
    )


def _when(stage: TraceStage, kind: str) -> dict[int, TraceSpan]:
    """The span of this kind for each training microbatch."""
    return {span.microbatch: span for span in stage.spans if span.kind == kind and span.microbatch >= 0}
