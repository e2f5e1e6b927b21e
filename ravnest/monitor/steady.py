"""A pipeline at full work, as its trace shows it: between filling up and running empty. Pure functions.

At the edges of what was traced, a stage also works on microbatches that were not: what it does there would look like
idleness. From when the first traced microbatch goes back through a stage, until the last has gone forward, everything
it did is in the trace; and by then the pipeline is full.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.monitor.trace import BUSY_KINDS, TraceSpan, TraceStage

MIN_MICROBATCHES: Final = 8
"""Fewer say little: an earlier stretch that has as many is taken before a later one that has not."""

_COLD_SHARE: Final = 4
"""A quarter of a session's first stretch is left out."""

_GAP_PERIODS: Final = 5
"""Where nothing was recorded for as long as so many microbatches take, something was left out of the trace."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """How one stage spent a stretch of time."""

    stage: TraceStage
    busy_fraction: float
    waits: Mapping[str, float]
    """By what held it up, which share of the time."""
    mean_seconds: Mapping[str, float]
    """By kind of work, what one piece of it took."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some time in the life of a cluster, on the axis of its trace."""

    began: float
    ended: float
    microbatches: tuple[int, ...]
    """Those that were let in meanwhile."""
    steady: bool
    """Whether the pipeline was full all the time; otherwise it is all that there is."""
    stages: tuple[StageFigures, ...]


def steady_stretch(stages: Sequence[TraceStage]) -> Stretch | None:
    """The latest long stretch in which the cluster of these stages was at full work. Where there is none, all of what
    was traced last; None where nothing was."""
    if not stages or not stages[0].spans:
        return None
    groups = _groups(stages)
    # The first microbatches of all have every machine to wake up.
    groups[0] = groups[0][len(groups[0]) // _COLD_SHARE :]
    stretches = [_stretch(stages, group) for group in groups]
    full = [found for found in stretches if found is not None and found.microbatches]
    if full:
        long = [found for found in full if len(found.microbatches) >= MIN_MICROBATCHES]
        return long[-1] if long else max(full, key=lambda found: len(found.microbatches))
    return _everything(stages)


def last_of(stretch: Stretch, stages: Sequence[TraceStage], most: int) -> tuple[float, float]:
    """The end of a stretch in which no more than so many microbatches are let in: from when and until when."""
    if len(stretch.microbatches) <= most:
        return stretch.began, stretch.ended
    first = stretch.microbatches[-most]
    return next(s.began for s in stages[0].spans if s.kind == "forward" and s.microbatch == first), stretch.ended


def _groups(stages: Sequence[TraceStage]) -> list[list[int]]:
    """Microbatches that every stage has worked on from beginning to end, in the order in which they were let in; a new
    group begins after an evaluation and after whatever was not traced."""
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
        # More are in flight than were traced.
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
    for span in _within(stage.spans, began, ended):
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


def _within(spans: Iterable[TraceSpan], began: float, ended: float) -> list[TraceSpan]:
    return [span for span in spans if span.began < ended and span.ended > began]


def _when(stage: TraceStage, kind: str) -> dict[int, TraceSpan]:
    """The span of this kind of each microbatch of training."""
    return {span.microbatch: span for span in stage.spans if span.kind == kind and span.microbatch >= 0}
