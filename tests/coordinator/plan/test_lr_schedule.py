"""The learning rate is followed through a job's own schedule, where nothing else says how many are in flight."""

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

from ravnest import Job, Pipeline
from ravnest.coordinator.plan import lr_schedule as rate_course
from ravnest.coordinator.plan.lr_schedule import RateCourse, allowed_in_run, rate_course_of
from ravnest.planner.in_flight.lr_bound import CAUTIOUS_STALENESS, cautious_flight
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.e2e.jobs import Batch, a_job, batches

ADAM = OptimizerSpec("AdamW", {"lr": 0.01})


def course(name: str, **arguments: float) -> RateCourse:
    return RateCourse(ADAM, ScheduleSpec(name, arguments))


class Unending:
    """Data of which nobody knows how much there is."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(batches([8] * 3))


def scheduled(updates: int = 100, **more: object) -> Job:
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=updates)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    return a_job(batches([8] * updates), optimizer=adam, schedule=cosine, **{"pipeline": Pipeline(), **more})


@pytest.mark.parametrize(
    ("name", "arguments", "shares"),
    [
        ("CosineAnnealingLR", {"T_max": 100}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ("StepLR", {"step_size": 10, "gamma": 0.1}, {9: 1.0, 10: 0.1, 25: 0.01}),
        ("LinearLR", {"start_factor": 0.1, "total_iters": 10}, {0: 0.1, 5: 0.55, 10: 1.0, 30: 1.0}),
        ("OneCycleLR", {"max_lr": 0.04, "total_steps": 101, "pct_start": 0.1}, {0: 0.04, 9: 1.0, 100: 0.0}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 10, "cycle_momentum": False}, {0: 0.1, 10: 1.0}),
    ],
)
def test_it_is_the_share_of_the_highest_that_the_schedule_reaches(
    name: str, arguments: dict[str, float], shares: dict[int, float]
) -> None:
    followed = course(name, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {updates: followed.share(updates) for updates in shares} == pytest.approx(shares, abs=0.01)


def test_a_run_that_goes_on_beyond_its_schedule_stays_at_the_end_of_it() -> None:
    followed = course("OneCycleLR", max_lr=0.04, total_steps=20)
    assert followed.share(10**6) == followed.share(10**7) == pytest.approx(0.0, abs=0.02)


def test_it_never_goes_back_and_one_look_takes_no_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_course, "MAX_STEPS", 10)
    followed = course("LinearLR", start_factor=1.0, end_factor=0.0, total_iters=40)
    assert [round(followed.share(30), 3) for _ in range(4)] == [0.75, 0.5, 0.25, 0.25]
    assert followed.share(5) == pytest.approx(0.25)


def test_a_rate_of_nothing_is_no_reason_to_divide_by_it() -> None:
    followed = RateCourse(OptimizerSpec("SGD", {"lr": 0.0}), ScheduleSpec("StepLR", {"step_size": 3}))
    assert followed.share(10) == 1.0


def test_the_number_follows_the_rate_of_a_job_with_a_schedule_alone() -> None:
    assert rate_course_of(scheduled()) is not None
    assert rate_course_of(scheduled(pipeline=Pipeline(in_flight=9))) is None
    assert rate_course_of(scheduled(pipeline=Pipeline(correction="none"))) is None
    assert rate_course_of(scheduled(pipeline=Pipeline(correction="foresight"))) is None
    assert rate_course_of(a_job(batches([8] * 5), pipeline=Pipeline())) is None


@pytest.mark.parametrize(
    ("schedule", "updates", "follows"),
    [
        (partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=10), 100, False),
        (partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=10), None, False),
        (partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=100), 100, True),
        (partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=100), None, True),
        (partial(lr_scheduler.ConstantLR, factor=0.1, total_iters=10), 100, False),
        (partial(lr_scheduler.ConstantLR, factor=0.1, total_iters=10), None, False),
        (partial(lr_scheduler.StepLR, step_size=200), 100, False),
        (partial(lr_scheduler.StepLR, step_size=50), 100, True),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=10**9), None, True),
    ],
)
def test_a_rate_that_never_falls_bounds_nothing(schedule: object, updates: int | None, follows: bool) -> None:
    data = Unending() if updates is None else batches([8] * updates)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    job = a_job(data, optimizer=adam, schedule=schedule, pipeline=Pipeline())
    assert (rate_course_of(job) is not None) == follows


def test_over_a_run_it_is_counted_how_often_how_many_are_allowed() -> None:
    allowed = allowed_in_run(scheduled(200), stages=8)
    assert sum(allowed.values()) == 200 and min(allowed) == 8
    assert allowed[8] > 40 and max(allowed) > 100
    nine = RateCourse(ADAM, ScheduleSpec("StepLR", {"step_size": 3}), accumulate=9)
    assert nine.allowed(8, 0) == cautious_flight(8, 9, 1.0) == 10 > 1 + CAUTIOUS_STALENESS


def test_of_a_run_whose_length_nobody_knows_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_in_run(a_job(batches([8] * 5), pipeline=Pipeline()), stages=8) == {}
    monkeypatch.setattr(rate_course, "MAX_STEPS", 10)
    assert allowed_in_run(scheduled(11), stages=8) == {} != allowed_in_run(scheduled(10), stages=8)
