"""What a pipeline does in steady state, from the moments when microbatches were completed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StageMoment:
    """What a stage had last reported: how long it has been there, and how long of that it was busy."""

    seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A microbatch is completed."""

    at: float
    stages: tuple[StageMoment, ...] = ()
    in_flight: int = 0
    """The limit that the root kept to, as it last reported; 0 where it did not."""


@dataclass(frozen=True, slots=True)
class Steady:
    microbatches_per_second: float
    microbatches: int
    busy: tuple[float, ...]
    """Of each stage."""
    in_flight: int
    """At the end."""


def steady(moments: Sequence[Moment], after: float, until: float) -> Steady:
    """Between two moments; ValueError where too little was completed to tell."""
    within = [moment for moment in moments if after <= moment.at <= until]
    if len(within) < 3:
        raise ValueError(f"only {len(within)} microbatches were completed in {until - after:.1f} s")
    first, last = within[0], within[-1]
    # Of the line that fits best, as several may be completed at once, at either end too.
    rate = float(np.polyfit([moment.at - first.at for moment in within], np.arange(len(within)), 1)[0])
    return Steady(
        rate,
        len(within),
        tuple(_busy(before, now) for before, now in zip(first.stages, last.stages, strict=True)),
        last.in_flight,
    )


def _busy(before: StageMoment, now: StageMoment) -> float:
    seconds = now.seconds - before.seconds
    # Work is counted when it is done: some that had begun before may be among it.
    return min(1.0, (now.busy_seconds - before.busy_seconds) / seconds) if seconds > 0 else 0.0
