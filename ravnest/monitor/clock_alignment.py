"""Clock offsets between machines, estimated from the frames that neighbouring stages exchange. Pure functions.

A frame cannot arrive before it was sent. So an activation gives a lower bound for how far the later stage's clock is
behind, and a gradient, which travels the other way, an upper bound. The fastest frame of each direction gives the
tightest bound. The estimate is the midpoint of the two bounds: it is exact if both directions are equally fast, and its
error is never more than half of the round trip of the fastest activation and the fastest gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """Times of one frame in seconds: sent by the sender's clock, arrived by the receiver's clock."""

    sent: float
    arrived: float


def offset_of(forward: Iterable[Crossing], backward: Iterable[Crossing]) -> float | None:
    """Seconds that convert the later stage's times to the earlier stage's clock, by addition; None without frames.

    `forward` are the frames to the later stage, `backward` those from it. With frames in one direction only, the
    fastest of them is assumed to have taken no time.
    """
    lower = max((crossing.sent - crossing.arrived for crossing in forward), default=None)
    upper = min((crossing.arrived - crossing.sent for crossing in backward), default=None)
    if lower is None or upper is None:
        return upper if lower is None else lower
    # Clock drift may put the lower bound above the upper one; the midpoint is still the best estimate.
    return (lower + upper) / 2


def align(links: Sequence[float | None], origins: Sequence[float]) -> list[float]:
    """Offsets that put the times of all stages on one axis, by addition.

    `links` are the offsets between each stage and the next, None where unknown. `origins`, one for each stage, are
    rough values of the result: they place the first stage and replace unknown links.
    """
    assert len(origins) == len(links) + 1, f"{len(links)} links do not join {len(origins)} stages"
    placed = [origins[0]]
    for number, link in enumerate(links):
        step = origins[number + 1] - origins[number] if link is None else link
        placed.append(placed[-1] + step)
    return placed
