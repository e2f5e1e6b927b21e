"""What a member may put into a round: no more weight than the ledger knows of, no difference wildly beyond the others'.

Pure functions; every verdict comes with its reason.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEFT_OUT_TIMES: Final = 10.0
"""Who is this many times beyond the length to which it would be clipped is left out."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """What becomes of a member's difference."""

    scale: float
    """In (0, 1]: what it is multiplied with; 0: the member is left out."""
    reason: str

    @property
    def left_out(self) -> bool:
        return self.scale == 0.0


@dataclass(frozen=True, slots=True)
class TypicalContribution:
    """What members brought into a round that counted, in the median."""

    norm: float
    samples: float


def typical_contribution(
    norms: Sequence[float], samples: Sequence[int], before: TypicalContribution | None = None
) -> TypicalContribution | None:
    """Of these members, all but those whose weight is 0 or who learned nothing; None where nobody did.

    Of two, of which either may lie, it is the one nearer to what was usual `before`, or that itself where it lies
    between them; with nothing known from before the longer one, so that nobody is made to look long by a claim.
    """
    did = [i for i in range(len(norms)) if samples[i] > 0 and norms[i] > 0.0]
    if not did:
        return None
    lengths = [norms[i] for i in did]
    if len(did) == 2 and before is not None:
        lengths.append(before.norm)
    return TypicalContribution(statistics.median_high(lengths), statistics.median(samples[i] for i in did))


def clip_outliers(
    norms: Sequence[float], samples: Sequence[int], outlier: float | None, before: TypicalContribution | None = None
) -> list[Clipping]:
    """Each member's norm against the median of the others', scaled up where it did more samples than they, never down.

    Beyond `outlier` times that it is clipped to it, beyond ten times as much left out. What others claim may be a lie,
    and a short claim is as easily made as a long one. So of an even number of others the longer of the middle two
    counts, which makes one liar among them harmless; and a single other counts only together with what was usual
    `before`, the longer of both. Where no other did anything, what was usual counts alone: one that was left out of a
    round must not be alone with its difference in the next. Nobody is judged with `outlier` None, without all that, or
    whose weight is 0 anyway.
    """
    return [_judge_one(i, norms, samples, outlier, before) for i in range(len(norms))]


def bounded(claimed: int, ledger: int) -> tuple[int, str | None]:
    """The samples that count as a member's weight, and why they are not those that it claims, where they are not."""
    if claimed < 0:
        return 0, f"it claims {claimed} samples; 0 count"
    if claimed > ledger:
        return ledger, f"it claims {claimed} samples, but the ledger knows of {ledger}, which count"
    return claimed, None


def _judge_one(
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
        if found is None or _limit(found, samples[index]) < _limit(before, samples[index]):
            found, whose = before, "what was usual in the last round"
        else:
            whose = "the other's"
    assert found is not None
    did = samples[index] / found.samples
    limit = outlier * _limit(found, samples[index])
    compared = f"its norm is {norms[index]:.4g}, {whose} is {found.norm:.4g}"
    if did > 1.0:
        compared += f" for {did:.3g} times fewer samples"
    if norms[index] > LEFT_OUT_TIMES * limit:
        return Clipping(0.0, f"{compared}: more than {LEFT_OUT_TIMES * outlier:g} times as much is left out")
    if norms[index] > limit:
        return Clipping(limit / norms[index], f"{compared}: clipped to {limit:.4g}, {outlier:g} times as much")
    return Clipping(1.0, compared)


def _limit(found: TypicalContribution, samples: int) -> float:
    """How long a difference of so many samples is by this measure."""
    return found.norm * max(1.0, samples / found.samples)
