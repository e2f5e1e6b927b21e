"""Busy time of a stage, counted during training only."""

import pytest

from ravnest.engine.telemetry.training_time import TrainingTime


def busy(time: TrainingTime) -> float:
    return time.busy_seconds / time.seconds


def test_the_wait_before_the_first_microbatch_does_not_count() -> None:
    time = TrainingTime()
    time.trained(100.0, 1.0, 0)
    time.trained(1.0, 1.0, 1)
    assert (time.seconds, time.busy_seconds) == (3.0, 2.0)


def test_the_count_restarts_when_the_pipeline_is_full() -> None:
    time = TrainingTime(warm_up=4)
    for number in range(3):
        time.trained(9.0, 1.0, number + 1)
    assert 0 < busy(time) < 0.2
    for number in range(3, 20):
        time.trained(0.0, 1.0, number + 1)
    assert busy(time) == 1.0 and time.seconds == 16.0


def test_an_evaluation_and_the_waits_around_it_do_not_count() -> None:
    time = TrainingTime()
    time.trained(0.0, 1.0, 1)
    time.paused(5.0, 2.0)
    time.stood_still()
    time.trained(7.0, 1.0, 2)
    time.trained(2.0, 1.0, 3)
    assert (time.seconds, time.busy_seconds) == (5.0, 3.0)


def test_averaging_during_training_counts_as_work() -> None:
    time = TrainingTime()
    time.trained(0.0, 1.0, 1)
    time.paused(0.5, 0.25)
    time.trained(0.25, 1.0, 2)
    assert time.seconds == pytest.approx(3.0) and time.busy_seconds == pytest.approx(2.25)
