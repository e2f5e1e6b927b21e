"""Decisions of the schedule: the next task, the limit in flight, and the reasons."""

import pytest

from ravnest.engine.schedule import Bound, Decision, ReadyCounts, Task, next_task


@pytest.mark.parametrize(
    ("waiting", "in_flight", "limit", "task"),
    [
        (ReadyCounts(1, 5, 5), 3, 3, Task.BACKWARD),
        (ReadyCounts(0, 5, 5), 2, 3, Task.FORWARD),
        (ReadyCounts(0, 5, 5), 3, 3, Task.EVALUATE),
        (ReadyCounts(0, 5, 0), 3, 3, Task.WAIT),
        (ReadyCounts(0, 5, 0), 99, None, Task.FORWARD),
        (ReadyCounts(0, 0, 1), 0, 1, Task.EVALUATE),
        (ReadyCounts(0, 0, 0), 0, 1, Task.WAIT),
    ],
)
def test_backward_first_then_forward_within_the_limit(
    waiting: ReadyCounts, in_flight: int, limit: int | None, task: Task
) -> None:
    decision = next_task(waiting, in_flight, limit)
    assert decision.task is task
    assert decision.reason


def test_forward_and_backward_alternate() -> None:
    both = ReadyCounts(3, 3, 3)
    assert next_task(both, 2, 4, after=Task.FORWARD).task is Task.BACKWARD
    turn = next_task(both, 2, 4, after=Task.BACKWARD)
    assert turn == Decision(Task.FORWARD, "2 in flight, limit 4, and the last task was a backward")
    assert next_task(both, 4, 4, after=Task.BACKWARD).task is Task.BACKWARD, "there is no room for a forward"
    assert next_task(both, 2, 4, Bound(2, 1), Task.BACKWARD).task is Task.BACKWARD, "it would become too stale"
    assert next_task(ReadyCounts(3, 0, 3), 2, 4, after=Task.BACKWARD).task is Task.BACKWARD


def test_a_full_stage_waits_and_gives_the_reason() -> None:
    full = next_task(ReadyCounts(0, 1, 0), 2, 2)
    assert full == Decision(Task.WAIT, "2 in flight is the limit; waiting for a gradient")
    assert next_task(ReadyCounts(0, 0, 0), 2, 2).reason == "nothing is ready"
