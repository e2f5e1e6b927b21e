"""Learning rate of a job after a number of updates, as a share of its highest: the schedule, stepped as stages step
it."""

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
"""Maximum steps of one call, as more would block the network's loop; the next calls make the others."""

_FALLEN: Final = 0.5


class RateCourse:
    """The course of a learning rate; it advances and never goes back."""

    def __init__(self, optimizer: OptimizerSpec, schedule: ScheduleSpec, accumulate: int = 1) -> None:
        self._accumulate = accumulate
        self._optimizer = optimizer.build([torch.nn.Parameter(torch.zeros(1, 1))])
        self._schedule = schedule.build(self._optimizer)
        # A step without gradients: torch warns if a schedule is stepped before its optimizer.
        self._optimizer.step()
        self._is_over = False
        [group] = self._optimizer.param_groups
        # The initial rate may be a fraction of the given one, or of the schedule's maximum.
        known = [group["initial_lr"], group.get("max_lr", 0.0), *getattr(self._schedule, "max_lrs", ())]
        self._highest = max(map(float, known))

    def share(self, updates: int) -> float:
        """The share after this number of updates; 1 at the highest rate, or if the rate is always 0."""
        rate = self._optimizer.param_groups[0]["lr"]
        for _ in range(min(updates - self._schedule.last_epoch, MAX_STEPS)):
            if self._is_over:
                break
            try:
                self._schedule.step()
            except ValueError:
                # Some schedules end after the number of steps that they were made for.
                self._is_over = True
            rate = self._optimizer.param_groups[0]["lr"]
        self._highest = max(self._highest, float(rate))
        return min(1.0, max(0.0, float(rate)) / self._highest) if self._highest > 0 else 1.0

    def allowed(self, stages: int, updates: int) -> int:
        """The number allowed in flight in a cluster of this many stages after this number of updates."""
        return cautious_flight(stages, self._accumulate, self.share(updates))


def rate_course_of(job: Job) -> RateCourse | None:
    """The course for a job whose number in flight follows its learning rate, else None.

    Such a job has a schedule that lowers the rate, does not set the number in flight, and uses the cautious correction.
    """
    schedule = job.schedule_spec
    if schedule is None or job.pipeline.in_flight is not None or choose_correction(job)[0] != CAUTIOUS:
        return None
    # A rate that stays high would never allow enough in flight for the lines: treat it as no schedule.
    return RateCourse(job.optimizer_spec, schedule, job.pipeline.accumulate) if _falls(job, schedule) else None


def _falls(job: Job, schedule: ScheduleSpec) -> bool:
    """Whether the rate falls to half of its highest by the end of the run; if the end is unknown or too far to step to,
    whether the schedule lowers the rate at all."""
    updates = updates_of(job, 1)
    if updates is not None and updates <= MAX_STEPS:
        return RateCourse(job.optimizer_spec, schedule).share(updates) <= _FALLEN
    if schedule.name == "LinearLR":
        end = schedule.arguments.get("end_factor", 1.0)
        return isinstance(end, int | float) and end <= _FALLEN
    return schedule.name != "ConstantLR"


def allowed_in_run(job: Job, stages: int) -> Mapping[int, int]:
    """For each bound on the number in flight, the number of the run's updates made under it. Empty if the number does
    not follow the learning rate, or the length of the run is unknown or more than MAX_STEPS."""
    course, updates = rate_course_of(job), updates_of(job, 1)
    if course is None or updates is None or updates > MAX_STEPS:
        return {}
    return Counter(course.allowed(stages, update) for update in range(updates))
