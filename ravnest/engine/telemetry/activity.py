"""What a stage does at one moment, to explain why nothing is completed.

Pure values. The worker makes them on any thread while its own may be stuck; the provider reports them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

What = Literal["feed", "forward", "gradient"]
"""Inputs or targets from the coordinator, activations from the stage before, gradients from the stage after."""

ANY: Final = -1
"""Instead of a microbatch's number: whichever comes next."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Microbatches that a stage has a part of, and waits for the rest."""

    what: What
    microbatch: int
    """The oldest of them, or ANY."""
    count: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What the torch thread of a stage does."""

    kind: str
    """forward, backward, update, evaluate, save, average or wait."""
    microbatch: int
    """Of the work; of a wait, the last that the stage worked on."""
    seconds: float
    """Since that began."""
    missing: tuple[Missing, ...] = ()
    """Of a wait: what would end it."""


def what_is_missing(
    *,
    fed: Collection[int],
    received: Collection[int],
    awaited: Collection[int],
    needs_feed: bool,
    needs_forward: bool,
) -> tuple[Missing, ...]:
    """What a stage without work waits for.

    `fed` and `received` are the microbatches of which one half has come, from the coordinator or from the stage before;
    `awaited` are those that were sent on and whose gradients have not come. Where nothing has begun, the stage waits
    for whichever microbatch comes next.
    """
    found = []
    if awaited:
        found.append(Missing("gradient", _oldest(awaited), len(awaited)))
    if fed and needs_forward:
        found.append(Missing("forward", _oldest(fed), len(fed)))
    if received and needs_feed:
        found.append(Missing("feed", _oldest(received), len(received)))
    if not found:
        found.append(Missing("forward" if needs_forward else "feed", ANY, 0))
    return tuple(found)


def _oldest(microbatches: Collection[int]) -> int:
    # Evaluation counts down from -1.
    return min(microbatches, key=abs)
