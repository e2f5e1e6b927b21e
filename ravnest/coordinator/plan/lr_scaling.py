"""Learning rate for several clusters: higher than for one, because each round combines more data.

C clusters make a C-th of the updates that one makes from the same samples, and a round combines the results of all C.
This corresponds to batches C times as large. For optimizers that divide by the size of gradients (Adam and similar),
the rate grows with the square root of C if training waits for rounds. In the background, the mean comes late, and
clusters drift apart meanwhile, farther with a higher rate: there it grows with the fourth root. For other optimizers
nothing was measured, and their rate stays unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from ravnest.job import Job
from ravnest.spec import OptimizerSpec, Plain, ScheduleSpec

_ADAPTIVE: Final = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax"})
_RATES: Final = ("max_lr", "base_lr", "eta_min")
"""Arguments of schedules that are rates, not multiples of the optimizer's rate."""


class RateFactor(NamedTuple):
    """Factor on the learning rate, and why."""

    factor: float
    reason: str


def rate_factor(job: Job, clusters: int) -> RateFactor:
    """The factor for a run with this number of clusters."""
    set_to = job.averaging.rate_factor
    if set_to is not None:
        return RateFactor(set_to, f"learning rate times {set_to:.3g}, as averaging.rate_factor says")
    if clusters == 1:
        return RateFactor(1.0, "learning rate unchanged: there is one cluster")
    name = job.optimizer_spec.name
    if name not in _ADAPTIVE:
        return RateFactor(1.0, f"learning rate unchanged: the factor for {clusters} clusters with {name} is not known")
    blocking = job.averaging.blocking
    factor = math.sqrt(clusters) if blocking else clusters**0.25
    why = f"the {'square' if blocking else 'fourth'} root of {clusters} clusters, whose rounds combine more data"
    return RateFactor(factor, f"learning rate times {factor:.3g}, {why}")


def scaled_optimizer(spec: OptimizerSpec, factor: float) -> OptimizerSpec:
    """The optimizer with its rate multiplied."""
    if factor == 1.0:
        return spec
    rate = spec.build([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"]
    return replace(spec, arguments={**spec.arguments, "lr": factor * rate})


def scaled_schedule(spec: ScheduleSpec | None, factor: float) -> ScheduleSpec | None:
    """The schedule with its own rates multiplied."""
    if spec is None or factor == 1.0:
        return spec
    changed: Mapping[str, Plain] = {
        name: _times(value, factor) for name, value in spec.arguments.items() if name in _RATES
    }
    return replace(spec, arguments={**spec.arguments, **changed})


def _times(value: Plain, factor: float) -> Plain:
    if isinstance(value, tuple):
        return tuple(factor * v for v in value)
    return factor * value if isinstance(value, int | float) and not isinstance(value, bool) else value
