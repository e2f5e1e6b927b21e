"""Limits on a member's share in a round: a weight within the coordinator's ledger, and a difference near the others'.

Pure functions; every decision comes with its reason.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEFT_OUT_TIMES: Final = 10.0
"""A member is left out if its difference is this many times longer than the length to which it would be clipped."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """The decision about a member's difference."""

    scale: float
    """The factor in (0, 1] that the difference is multiplied by; 0: the member is left out."""
    reason: str

    @property
    def is_left_out(self) -> bool:
        return self.scale == 0.0


@dataclass(frozen=True, slots=True)
class TypicalContribution:
    """The medians of the members' contributions to a committed round."""

    norm: float
    samples: float


def typical_contribution(
    norms: Sequence[float], samples: Sequence[int], before: TypicalContribution | None = None
) -> TypicalContribution | None:
    """The typical contribution of the members that have a weight and a difference; None where no member has both.

    Either of two members may lie. So for two members the typical length is the middle one of both lengths and the
    length `before`; without `before` it is the longer one, so that no claim makes an honest member look long.
    """
    active = [i for i in range(len(norms)) if samples[i] > 0 and norms[i] > 0.0]
    if not active:
        return None
    lengths = [norms[i] for i in active]
    if len(active) == 2 and before is not None:
        lengths.append(before.norm)
    return TypicalContribution(statistics.median_high(lengths), statistics.median(samples[i] for i in active))


def clip_outliers(
    norms: Sequence[float], samples: Sequence[int], outlier: float | None, before: TypicalContribution | None = None
) -> list[Clipping]:
    """Compare each member's norm with the median of the others', scaled up (never down) for a member that trained on
    more samples than they did.

    A difference longer than `outlier` times that is clipped to it; ten times longer, and the member is left out. The
    other members' claims may be lies, and a short claim is as easily made as a long one:

    - With an even number of others, the longer of the middle two counts. One liar among them is then harmless.
    - A single other counts only together with the typical contribution `before`, whichever is longer.
    - Without any active other, the typical contribution `before` counts alone. Otherwise a member that was left out of
      a round would be alone with its difference in the next one.

    A member is not judged with `outlier` None, without anything to compare it with, or with weight 0.
    """
    return [_clip_one(i, norms, samples, outlier, before) for i in range(len(norms))]


def bounded(claimed: int, ledger: int) -> tuple[int, str | None]:
    """The samples that count as a member's weight, and the reason if they differ from its claim."""
    if claimed < 0:
        return 0, f"it claims {claimed} samples; 0 count"
    if claimed > ledger:
        return ledger, f"it claims {claimed} samples, but the ledger knows of {ledger}, which count"
    return claimed, None


def _clip_one(
    index: int,
    norms: Sequence[float],
    samples: Sequence[int],
    outlier: float | None,
    before: TypicalContribution | None,
) -> Clipping:
    if outlier is None:
        return Clipping(1.0, "differences are not judged")
    if samples[index] <= 0:
        return Clipping(1.0, "it has no weight")
    others = [i for i in range(len(norms)) if i != index and samples[i] > 0 and norms[i] > 0.0]
    found = typical_contribution([norms[i] for i in others], [samples[i] for i in others])
    whose = "the median of the others'"
    if len(others) < 2:
        if before is None:
            return Clipping(1.0, "there are no two others to compare it with, and nothing is known of earlier rounds")
        if found is None or _expected_norm(found, samples[index]) < _expected_norm(before, samples[index]):
            found, whose = before, "the usual norm in the last round"
        else:
            whose = "the other's"
    assert found is not None
    times_samples = samples[index] / found.samples
    limit = outlier * _expected_norm(found, samples[index])
    compared = f"its norm is {norms[index]:.4g}, {whose} is {found.norm:.4g}"
    if times_samples > 1.0:
        compared += f" for {times_samples:.3g} times fewer samples"
    if norms[index] > LEFT_OUT_TIMES * limit:
        return Clipping(0.0, f"{compared}: more than {LEFT_OUT_TIMES * outlier:g} times as much is left out")
    if norms[index] > limit:
        return Clipping(limit / norms[index], f"{compared}: clipped to {limit:.4g}, {outlier:g} times as much")
    return Clipping(1.0, compared)


def _expected_norm(typical: TypicalContribution, samples: int) -> float:
    return typical.norm * max(1.0, samples / typical.samples)
