"""The clocks of machines differ: how far, found from what flows between neighbouring stages. Pure functions.

A frame cannot arrive before it was sent. So activations say by how much the later stage's clock is behind at least, and
gradients, which go the other way, by how much at most. Of many frames the quickest of each direction count. The middle
between the two bounds is right if both directions are equally quick, and is never further off than half of what the
quickest activations and the quickest gradients took together on the way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """A frame's way over a link: when it was sent by its sender's clock, and arrived by its receiver's, in seconds."""

    sent: float
    arrived: float


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to the later stage's times to have them on the earlier stage's clock."""

    seconds: float
    uncertainty_seconds: float | None
    """It is off by no more than this. None: frames were seen in one direction only, taken as though they took no
    time."""


def offset_of(forward: Iterable[Crossing], backward: Iterable[Crossing]) -> Offset | None:
    """How two neighbours' clocks stand, from frames to the later stage and from it; None where there are none."""
    least = max((crossing.sent - crossing.arrived for crossing in forward), default=None)
    most = min((crossing.arrived - crossing.sent for crossing in backward), default=None)
    if least is not None and most is not None:
        # Clocks that do not run equally fast may make the least more than the most: the middle is the best guess still.
        return Offset((least + most) / 2, abs(most - least) / 2)
    if least is not None:
        return Offset(least, None)
    return None if most is None else Offset(most, None)


def align(links: Sequence[Offset | None], origins: Sequence[float]) -> list[float]:
    """What to add to each stage's times to have all of them on one axis.

    `links` are the offsets between each stage and the next; `origins`, one for each stage, are rough values of what is
    wanted, which place the first stage and take the place of a link that is not known.
    """
    assert len(origins) == len(links) + 1, f"{len(links)} links do not join {len(origins)} stages"
    placed = [origins[0]]
    for number, link in enumerate(links):
        step = origins[number + 1] - origins[number] if link is None else link.seconds
        placed.append(placed[-1] + step)
    return placed
