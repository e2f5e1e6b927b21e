"""Activity of a stage: its current work or wait, reported to explain why a pipeline does not progress.

Plain values, which any thread can create while the worker's own thread is stuck.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

MissingKind = Literal["feed", "forward", "gradient"]
"""Inputs or targets from the coordinator, activations from the stage before, gradients from the stage after."""

ANY: Final = -1
"""In place of a microbatch's number: any microbatch."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Messages that a stage waits for to complete microbatches that it has a part of."""

    what: MissingKind
    microbatch: int
    """The oldest of these microbatches, or ANY."""
    count: int
    """Number of these microbatches."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Current work or wait of a stage's worker thread."""

    kind: str
    """forward, backward, update, evaluate, save, average or wait."""
    microbatch: int
    """The microbatch of the work; for a wait, the last one worked on."""
    seconds: float
    """Time since the start of the work or wait."""
    missing: tuple[Missing, ...] = ()
    """For a wait: the messages that would end it."""


def missing_messages(
    *,
    fed: Collection[int],
    received: Collection[int],
    awaited: Collection[int],
    needs_feed: bool,
    needs_forward: bool,
) -> tuple[Missing, ...]:
    """The messages that a stage without a ready task waits for.

    `fed` and `received` are the microbatches of which one half has arrived, from the coordinator or from the stage
    before; `awaited` are those that were sent on and whose gradients have not arrived. A stage without any of these
    waits for a new microbatch.
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
    # Evaluations are numbered -1, -2, ….
    return min(microbatches, key=abs)
