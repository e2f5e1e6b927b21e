"""Which task a stage takes next. Pure functions: the decision and its reason.

A backward and a forward in turn, where both are ready. Backwards always first would free memory a little sooner, but a
pipeline that a line once held up would never be even again: gradients that come one behind the other keep every stage
from its forwards, and these then come one behind the other too, so that all microbatches travel as one convoy, and the
other stages wait for it.

A root holds forwards back when as many microbatches as it is told to have are between forward and backward. Every stage
holds a forward back that would break the bound on staleness: its microbatch would see more updates until its backward
than may be.

Nothing waits for ever, whatever the limits are. A backward is never held back, and a forward only while the stage has
other microbatches between forward and backward. Microbatches come in the same order everywhere, so the oldest of all
that are under way finds none before it at any stage: it goes through, and then it is the next one's turn.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Task(enum.Enum):
    BACKWARD = "backward"
    FORWARD = "forward"
    EVALUATE = "evaluate"
    WAIT = "wait"


class Decision(NamedTuple):
    task: Task
    reason: str


class ReadyCounts(NamedTuple):
    """What lies ready at a stage."""

    backwards: int
    forwards: int
    evaluations: int


class Bound(NamedTuple):
    """How stale the next forward would become, and may become at most."""

    staleness: int = 0
    most: int | None = None

    @property
    def holds(self) -> bool:
        return self.most is None or self.staleness <= self.most


def next_task(
    waiting: ReadyCounts, in_flight: int, limit: int | None, bound: Bound | None = None, after: Task = Task.FORWARD
) -> Decision:
    """The next task, given what is ready, how many microbatches this stage has between forward and backward, its limit
    on these, the bound on staleness, and what of both it did last."""
    room = limit is None or in_flight < limit
    forward = waiting.forwards and room and (bound is None or bound.holds)
    if waiting.backwards and not (forward and after is Task.BACKWARD):
        return Decision(Task.BACKWARD, "a gradient is here")
    if forward:
        turn = ", and the last was a backward" if waiting.backwards else ""
        return Decision(
            Task.FORWARD, f"{in_flight} in flight, {'no limit here' if limit is None else f'limit {limit}'}{turn}"
        )
    if waiting.evaluations:
        return Decision(Task.EVALUATE, "nothing to train on is ready")
    if waiting.forwards and bound is not None and room:
        return Decision(Task.WAIT, f"it would see {bound.staleness} updates, and {bound.most} is the bound")
    if waiting.forwards:
        return Decision(Task.WAIT, f"{in_flight} in flight is the limit; waiting for a gradient")
    return Decision(Task.WAIT, "nothing is ready")


def updates_before(summed: int, accumulate: int, flushes: Iterable[bool]) -> int:
    """How many updates a stage makes before the backward of a microbatch whose forward comes now.

    `summed` gradients wait to be applied, which takes `accumulate` of them; `flushes` says of each microbatch between
    forward and backward, in order, whether it is applied at once with what is summed by then.
    """
    updates = 0
    for flush in flushes:
        summed += 1
        if flush or summed >= accumulate:
            updates, summed = updates + 1, 0
    return updates
