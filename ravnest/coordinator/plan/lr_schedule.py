"""How high a job's learning rate is after so many updates, as a share of its highest: its schedule, stepped here as the
stages step it."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import torch

from ravnest.coordinator.plan.prepared_job import choose_correction, updates_of
from ravnest.engine.corrections.correction import CAUTIOUS
from ravnest.job import Job
from ravnest.planner.in_flight.lr_bound import cautious_flight
from ravnest.spec import OptimizerSpec, ScheduleSpec

MAX_STEPS: Final = 20_000
"""At one look: more would keep the network waiting. Whoever is further on is caught up with at the next ones."""

_FALLEN: Final = 0.5


class RateCourse:
    """It goes on and never back."""

    def __init__(self, optimizer: OptimizerSpec, schedule: ScheduleSpec, accumulate: int = 1) -> None:
        self._accumulate = accumulate
        self._optimizer = optimizer.build([torch.nn.Parameter(torch.zeros(1, 1))])
        self._schedule = schedule.build(self._optimizer)
        # There is no gradient to step with; torch warns where a schedule goes on before its optimizer.
        self._optimizer.step()
        self._is_over = False
        [group] = self._optimizer.param_groups
        # What a schedule begins with may be a fraction of what it is given, or of what it goes up to.
        known = [group["initial_lr"], group.get("max_lr", 0.0), *getattr(self._schedule, "max_lrs", ())]
        self._highest = max(map(float, known))

    def share(self, updates: int) -> float:
        """After so many updates; 1 where the rate is at its highest, or was never above nothing."""
        rate = self._optimizer.param_groups[0]["lr"]
        for _ in range(min(updates - self._schedule.last_epoch, MAX_STEPS)):
            if self._is_over:
                break
            try:
                self._schedule.step()
            except ValueError:
                # Some end after the steps that they were made for.
                self._is_over = True
            rate = self._optimizer.param_groups[0]["lr"]
        self._highest = max(self._highest, float(rate))
        return min(1.0, max(0.0, float(rate)) / self._highest) if self._highest > 0 else 1.0

    def allowed(self, stages: int, updates: int) -> int:
        """As many as may be in flight in a cluster of so many stages after so many updates."""
        return cautious_flight(stages, self._accumulate, self.share(updates))


def rate_course_of(job: Job) -> RateCourse | None:
    """Of a job whose number in flight follows its learning rate: one that has a schedule which lowers it, says nothing
    of how many are in flight, and has the correction that is cautious. None for others."""
    schedule = job.schedule_spec
    if schedule is None or job.pipeline.in_flight is not None or choose_correction(job)[0] != CAUTIOUS:
        return None
    # A rate that stays high would never let lines be full: then it is as without a schedule.
    return RateCourse(job.optimizer_spec, schedule, job.pipeline.accumulate) if _falls(job, schedule) else None


def _falls(job: Job, schedule: ScheduleSpec) -> bool:
    """Whether the rate is at most half of its highest by the end of the run; where that is too far to step to, or not
    known, whether the schedule is one that lowers it at all."""
    updates = updates_of(job, 1)
    if updates is not None and updates <= MAX_STEPS:
        return RateCourse(job.optimizer_spec, schedule).share(updates) <= _FALLEN
    if schedule.name == "LinearLR":
        end = schedule.arguments.get("end_factor", 1.0)
        return isinstance(end, int | float) and end <= _FALLEN
    return schedule.name != "ConstantLR"


def allowed_in_run(job: Job, stages: int) -> Mapping[int, int]:
    """With at most how many in flight how many of the run's updates are made. Empty where the number does not follow
    the learning rate, or the length of the run is not known or beyond what is stepped at once."""
    course, updates = rate_course_of(job), updates_of(job, 1)
    if course is None or updates is None or updates > MAX_STEPS:
        return {}
    return Counter(course.allowed(stages, update) for update in range(updates))
