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
class Verdict:
    """What becomes of a member's difference."""

    scale: float
    """In (0, 1]: what it is multiplied with; 0: the member is left out."""
    reason: str

    @property
    def left_out(self) -> bool:
        return self.scale == 0.0


def judge(norms: Sequence[float], samples: Sequence[int], outlier: float | None) -> list[Verdict]:
    """Each member's norm against the median of the others', scaled up where it did more samples than they, never down.

    Beyond `outlier` times that it is clipped to it, beyond ten times as much left out. Nobody is judged with `outlier`
    None, without others, where the others did nothing, or whose weight is 0 anyway.
    """
    return [_judge_one(i, norms, samples, outlier) for i in range(len(norms))]


def bounded(claimed: int, ledger: int) -> tuple[int, str | None]:
    """The samples that count as a member's weight, and why they are not those that it claims, where they are not."""
    if claimed < 0:
        return 0, f"it claims {claimed} samples; 0 count"
    if claimed > ledger:
        return ledger, f"it claims {claimed} samples, but the ledger knows of {ledger}, which count"
    return claimed, None


def _judge_one(index: int, norms: Sequence[float], samples: Sequence[int], outlier: float | None) -> Verdict:
    if outlier is None:
        return Verdict(1.0, "differences are not judged")
    if samples[index] <= 0:
        return Verdict(1.0, "it has no weight")
    others = [i for i in range(len(norms)) if i != index and samples[i] > 0 and norms[i] > 0.0]
    if not others:
        return Verdict(1.0, "there is nobody to compare it with")
    usual = statistics.median(norms[i] for i in others)
    did = samples[index] / statistics.median(samples[i] for i in others)
    limit = outlier * usual * max(1.0, did)
    compared = f"its norm is {norms[index]:.4g}, the median of the others' is {usual:.4g}"
    if did > 1.0:
        compared += f" for {did:.3g} times fewer samples"
    if norms[index] > LEFT_OUT_TIMES * limit:
        return Verdict(0.0, f"{compared}: more than {LEFT_OUT_TIMES * outlier:g} times as much is left out")
    if norms[index] > limit:
        return Verdict(limit / norms[index], f"{compared}: clipped to {limit:.4g}, {outlier:g} times as much")
    return Verdict(1.0, compared)
