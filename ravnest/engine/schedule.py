"""Schedule: decides which task a stage runs next. Pure functions that return the decision and its reason.

If both a backward and a forward are ready, they alternate. Running backwards first would free memory slightly sooner,
but would never recover from one slow transfer: gradients that arrive in a burst would delay the forwards of every
stage, the forwards would then arrive in a burst too, and all microbatches would move as one convoy while most stages
wait.

A root holds forwards back while the number of microbatches in flight is at its limit. If a leaf looks rows up for it, a
microbatch begins there, and the leaf holds the lookups back. Every stage holds a forward back
that would exceed the bound on staleness, because too many updates would happen before its backward.

No limit can cause a deadlock. A backward is never held back, and a forward only while the stage has other microbatches
in flight. Microbatches arrive in the same order at every stage, so nothing holds back the oldest one in flight: it
completes, and the next one becomes the oldest.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Task(enum.Enum):
    BACKWARD = "backward"
    """On a leaf that looks rows up: take the gradients of these rows."""
    FORWARD = "forward"
    LOOKUP = "lookup"
    """Look rows up for the root, with which a microbatch begins."""
    EVALUATE = "evaluate"
    WAIT = "wait"


class Decision(NamedTuple):
    task: Task
    reason: str


class ReadyCounts(NamedTuple):
    """Number of messages ready for each task."""

    backwards: int
    forwards: int
    evaluations: int
    lookups: int | None = None
    """None: the stage looks no rows up for another."""

    @property
    def total(self) -> int:
        return self.backwards + self.forwards + self.evaluations + (self.lookups or 0)


class Bound(NamedTuple):
    """Staleness that the next forward would have at its backward, and the maximum allowed."""

    staleness: int = 0
    max_staleness: int | None = None

    @property
    def holds(self) -> bool:
        return self.max_staleness is None or self.staleness <= self.max_staleness


def next_task(
    waiting: ReadyCounts, in_flight: int, limit: int | None, bound: Bound | None = None, after: Task = Task.FORWARD
) -> Decision:
    """The next task of a stage with `in_flight` microbatches between forward and backward and this limit on them;
    `after` is its last training task."""
    room = limit is None or in_flight < limit
    may_begin = room and (bound is None or bound.holds)
    if waiting.lookups and may_begin:
        return Decision(Task.LOOKUP, f"the root needs rows; {in_flight} in flight")
    looks_up = waiting.lookups is not None
    forward = waiting.forwards and (looks_up or may_begin)
    held = waiting.lookups if looks_up else waiting.forwards
    if waiting.backwards and not (forward and after is Task.BACKWARD):
        return Decision(Task.BACKWARD, "a gradient is ready")
    if forward:
        turn = ", and the last task was a backward" if waiting.backwards else ""
        return Decision(
            Task.FORWARD, f"{in_flight} in flight, {'no limit here' if limit is None else f'limit {limit}'}{turn}"
        )
    if waiting.evaluations:
        return Decision(Task.EVALUATE, "nothing to train on is ready")
    if held and bound is not None and room:
        return Decision(
            Task.WAIT, f"{bound.staleness} updates of staleness would exceed the bound of {bound.max_staleness}"
        )
    if held:
        return Decision(Task.WAIT, f"{in_flight} in flight is the limit; waiting for a gradient")
    return Decision(Task.WAIT, "nothing is ready")


def updates_before(summed: int, accumulate: int, flushes: Iterable[bool]) -> int:
    """Number of updates that a stage makes before the backward of a microbatch whose forward is next.

    `summed` gradients are not yet applied, and an update takes `accumulate` of them. `flushes` tells for each
    microbatch in flight, in order, whether its backward applies the sum immediately.
    """
    updates = 0
    for flush in flushes:
        summed += 1
        if flush or summed >= accumulate:
            updates, summed = updates + 1, 0
    return updates
