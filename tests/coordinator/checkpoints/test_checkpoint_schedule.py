"""When a checkpoint is due by the clock, and when never."""

from ravnest.coordinator.checkpoints.schedule import CheckpointSchedule
from ravnest.settings import Checkpoint


def test_due_by_time_since_the_last_one() -> None:
    now = 1000.0
    schedule = CheckpointSchedule(Checkpoint(every_seconds=60), clock=lambda: now)
    assert schedule.due(1) is None
    now += 61
    assert schedule.due(1) == "61 s since the last one"


def test_lines_that_carry_less_than_was_wished_make_checkpoints_rarer() -> None:
    now = 1000.0
    schedule = CheckpointSchedule(Checkpoint(every_seconds=60, every_updates=50), clock=lambda: now)
    schedule.min_seconds = 300.0
    now += 299
    assert schedule.due(1) is None
    assert schedule.due(50) == "50 updates since the last one", "a promise by count is kept"
    now += 2
    assert schedule.due(1) == "301 s since the last one"


def test_never_due_when_both_are_switched_off() -> None:
    assert CheckpointSchedule(Checkpoint(every_seconds=None)).due(10**9) is None
