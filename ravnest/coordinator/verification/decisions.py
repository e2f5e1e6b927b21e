"""Decisions about the check of a written model: how much of it to do, and whether its scores match the reported ones.

Pure functions; each gives its reason as text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.units import counted

_MIN_SECONDS: Final = 0.3
_MAX_SECONDS: Final = 120.0
_SHARE: Final = 0.02
_FLIPPED: Final = 2.0
"""Samples that a metric may count differently, because two classes have almost the same score."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of a check to do."""

    seconds: float
    """Time limit, unless no batch has been evaluated by then."""
    max_samples: int | None
    """Samples of a batch to evaluate; None for whole batches."""
    batches: int
    """The number of batches that should take that long."""
    reason: str


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference between two machines that compute the same."""

    relative: float
    absolute: float
    reason: str


@dataclass(frozen=True, slots=True)
class ScoreComparison:
    """Whether the written model is the one that was evaluated."""

    passed: bool
    reason: str


def effort(run_seconds: float, batch_seconds: float, batch_samples: int) -> Effort:
    """How long a check may take, and how many samples of a batch it evaluates, if a batch takes this long here."""
    seconds = min(_MAX_SECONDS, max(_MIN_SECONDS, _SHARE * run_seconds))
    share = f"{seconds:.1f} s, {_SHARE:.0%} of the run's time within {_MIN_SECONDS} s and {_MAX_SECONDS:.0f} s"
    if batch_seconds <= seconds:
        batches = max(1, int(seconds / max(batch_seconds, 1e-6)))
        return Effort(seconds, None, batches, f"as many batches as take {share}")
    samples = max(1, int(batch_samples * seconds / batch_seconds))
    whole = f"a whole one takes about {batch_seconds:.1f} s here, and there is {share}"
    return Effort(seconds, samples, 1, f"{counted(samples, 'sample')} of a batch: {whole}")


def tolerance(half_precision: bool, other_device: bool) -> Tolerance:
    """Allowed difference between two evaluations of the same weights on the same batches.

    It is larger than rounding errors in ordinary models, because some have operators that jump (an argmin over a
    codebook): no honest run should fail after hours, and a false score within the tolerance is not worth reporting.
    """
    if half_precision:
        return Tolerance(5e-2, 2e-2, "the model computes in a half precision")
    if other_device:
        return Tolerance(2e-2, 2e-3, "the swarm computed on another kind of device")
    return Tolerance(5e-3, 5e-4, "both computed in float32 or better on processors")


def compare_scores(
    reported: Mapping[str, float], measured: Mapping[str, float], samples: int, batches: int, allowed: Tolerance
) -> ScoreComparison:
    """Whether the scores of the file are those that the swarm reported, both means over the same samples. A loss must
    be equal up to rounding; a metric, which may count samples, may differ by two samples."""
    apart = []
    for name, said in reported.items():
        found = measured[name]
        if not math.isfinite(said) and not math.isfinite(found):
            continue
        flips = 0.0 if name == "loss" else _FLIPPED / max(1, samples) * max(1.0, abs(said))
        within = allowed.absolute + flips + allowed.relative * max(abs(said), abs(found))
        # A comparison with NaN is false.
        if not abs(said - found) <= within:
            apart.append(name)
    on = f"on {counted(samples, 'sample')} in {counted(batches, 'batch', 'batches')}"
    both = ", ".join(f"{name} {measured[name]:.4g} and {reported[name]:.4g}" for name in (apart or sorted(reported)))
    if apart:
        return ScoreComparison(False, f"{on} the file gives and the swarm reported: {both}")
    return ScoreComparison(True, f"{on} the file gives what the swarm reported: {both} ({allowed.reason})")
