"""Which task a stage takes next. Pure functions: the decision and its reason.

Backward first: it frees memory, lets the stages before go on, and keeps staleness low. A root holds forwards back when
as many microbatches as allowed are between forward and backward; the stages after it take whatever comes.
"""

import enum
from typing import NamedTuple


class Task(enum.Enum):
    BACKWARD = "backward"
    FORWARD = "forward"
    EVALUATE = "evaluate"
    WAIT = "wait"


class Decision(NamedTuple):
    task: Task
    reason: str


class Waiting(NamedTuple):
    """What lies ready at a stage."""

    backwards: int
    forwards: int
    evaluations: int


def next_task(waiting: Waiting, in_flight: int, limit: int | None) -> Decision:
    """The next task, given what is ready, how many microbatches this stage has between forward and backward, and its
    limit."""
    if waiting.backwards:
        return Decision(Task.BACKWARD, "a gradient is here; backward comes first")
    if waiting.forwards and (limit is None or in_flight < limit):
        return Decision(
            Task.FORWARD, f"{in_flight} in flight, {'no limit here' if limit is None else f'limit {limit}'}"
        )
    if waiting.evaluations:
        return Decision(Task.EVALUATE, "nothing to train on is ready")
    if waiting.forwards:
        return Decision(Task.WAIT, f"{in_flight} in flight is the limit; waiting for a gradient")
    return Decision(Task.WAIT, "nothing is ready")
