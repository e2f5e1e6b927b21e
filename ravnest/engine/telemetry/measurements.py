"""Measurements of a worker: how long each piece of work took, how busy the stage is, how stale its updates are.

All of it is written on the worker's thread. Other threads may read the counters, the activity and the flight time at
any moment, even while the worker's thread is stuck.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from ravnest.engine.schedule import Task
from ravnest.engine.speed.pace import Pace
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.spans import Span


class Measurements:
    """Calls `record` with the span of each piece of work and each wait, once it is over."""

    def __init__(self, counters: Counters, pace: Pace, record: Callable[[Span], None]) -> None:
        self.counters = counters
        self.pace = pace
        self.latest = -1
        """The microbatch of the last task: work between two tasks is recorded under its number."""
        self.doing = ("wait", -1, time.perf_counter())
        """What the thread does, with which microbatch, and since when."""
        self._record = record
        self._flight = (counters.flight_seconds, 0, time.perf_counter())
        """Seconds that microbatches have been between forward and backward up to some moment, how many are there since,
        and the moment."""
        # The stage stands still until there is something to train on.
        counters.training.stood_still()

    @contextlib.contextmanager
    def work(self, kind: str, microbatch: int) -> Iterator[None]:
        """A piece of work: slowed down to the pace of the machine that is simulated, counted, and recorded."""
        with self.timed(kind, microbatch), self.pace.work(kind):
            yield

    @contextlib.contextmanager
    def timed(self, kind: str, microbatch: int | None = None) -> Iterator[None]:
        """A piece of work that takes the time that it takes, counted and recorded; without a microbatch it belongs to
        the latest one."""
        number = self.latest if microbatch is None else microbatch
        began = time.perf_counter()
        self.doing = (kind, number, began)
        yield
        ended = time.perf_counter()
        spent = self.counters.seconds
        spent[kind] = spent.get(kind, 0.0) + ended - began
        self._record(Span(kind, number, began, ended))

    def begin_wait(self) -> None:
        self.doing = ("wait", self.latest, time.perf_counter())

    def record_waits(self, waits: list[tuple[str, float]], until: float) -> None:
        """`waits` holds the reason of each wait and when it began; each ends when the next one begins."""
        for index, (reason, began) in enumerate(waits):
            ended = waits[index + 1][1] if index + 1 < len(waits) else until
            self._record(Span("wait", self.latest, began, ended, reason))

    def count_turn(self, task: Task, *, is_pause: bool, waited: float, worked: float) -> None:
        """One turn of the worker is over. `is_pause`: it had no task of its own, only work between two tasks."""
        self.counters.busy_seconds += worked
        training = self.counters.training
        if task in (Task.FORWARD, Task.BACKWARD):
            training.trained(waited, worked, self.counters.backwards)
        elif is_pause:
            training.paused(waited, worked)
        else:
            training.stood_still()

    def count_update(self, staleness: int) -> None:
        self.counters.updates += 1
        counts = self.counters.staleness
        counts[staleness] = counts.get(staleness, 0) + 1

    def count_in_flight(self, microbatches: int) -> None:
        """From now on this many microbatches are between forward and backward."""
        seconds, in_flight, since = self._flight
        now = time.perf_counter()
        self._flight = (seconds + in_flight * (now - since), microbatches, now)

    @property
    def flight_seconds(self) -> float:
        """Time that all microbatches so far have been between forward and backward, summed."""
        seconds, in_flight, since = self._flight
        return seconds + in_flight * (time.perf_counter() - since)

    def close(self) -> None:
        """Leaves the flight time in the counters, for the next worker of the stage."""
        self.counters.flight_seconds = self.flight_seconds
        self._flight = (self.counters.flight_seconds, 0, time.perf_counter())
