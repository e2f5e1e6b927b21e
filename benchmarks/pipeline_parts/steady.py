"""Rates of a pipeline in steady state, computed from the times at which microbatches were completed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StageMoment:
    """Last report of a stage: the seconds since it started, and how many of them it was busy."""

    seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Moment:
    """Completion of a microbatch."""

    at: float
    stages: tuple[StageMoment, ...] = ()
    in_flight: int = 0
    """In-flight limit that the root reported last; 0 without a report."""


@dataclass(frozen=True, slots=True)
class Steady:
    microbatches_per_second: float
    microbatches: int
    busy: tuple[float, ...]
    """Busy share of each stage."""
    in_flight: int
    """In-flight limit at the end."""


def steady(moments: Sequence[Moment], after: float, until: float) -> Steady:
    """The rates between two times; ValueError if too few microbatches were completed."""
    within = [moment for moment in moments if after <= moment.at <= until]
    if len(within) < 3:
        raise ValueError(f"only {len(within)} microbatches were completed in {until - after:.1f} s")
    first, last = within[0], within[-1]
    # The slope of the best-fitting line, since several microbatches may be completed at once, also at either end.
    rate = float(np.polyfit([moment.at - first.at for moment in within], np.arange(len(within)), 1)[0])
    return Steady(
        rate,
        len(within),
        tuple(_busy(before, now) for before, now in zip(first.stages, last.stages, strict=True)),
        last.in_flight,
    )


def _busy(before: StageMoment, now: StageMoment) -> float:
    seconds = now.seconds - before.seconds
    # Work is counted at its end, so it may include work that began earlier.
    return min(1.0, (now.busy_seconds - before.busy_seconds) / seconds) if seconds > 0 else 0.0
