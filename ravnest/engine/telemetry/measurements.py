"""Measurements of a worker: time of each piece of work, busy time of the stage, staleness of its updates.

Only the worker's thread writes them. Other threads may read the counters, the activity and the flight time at any time,
even while the worker's thread is stuck.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from ravnest.engine.schedule import Task
from ravnest.engine.speed.pretended_pace import Pace
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.spans import Span


class Measurements:
    """Calls `record` with the span of each piece of work and each wait, once it is over."""

    def __init__(self, counters: Counters, pace: Pace, record: Callable[[Span], None]) -> None:
        self.counters = counters
        self.pace = pace
        self.latest = -1
        """The microbatch of the last task; work between two tasks is recorded under its number."""
        self.doing = ("wait", -1, time.perf_counter())
        """The kind of the current work, its microbatch, and its start."""
        self._record = record
        self._flight = (counters.flight_seconds, 0, time.perf_counter())
        """Summed flight time up to some moment, the number of microbatches in flight since, and the moment."""
        # Training stands still until the first microbatch.
        counters.training.stood_still()

    @contextlib.contextmanager
    def work(self, kind: str, microbatch: int) -> Iterator[None]:
        """Context of a piece of work that is slowed down to the pace of the simulated machine, timed and recorded."""
        with self.timed(kind, microbatch), self.pace.work(kind):
            yield

    @contextlib.contextmanager
    def timed(self, kind: str, microbatch: int | None = None) -> Iterator[None]:
        """Context of a piece of work that is timed and recorded; without a microbatch it belongs to the latest one."""
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
        """Records waits, given as reason and start; each ends at the start of the next one, the last at `until`."""
        for index, (reason, began) in enumerate(waits):
            ended = waits[index + 1][1] if index + 1 < len(waits) else until
            self._record(Span("wait", self.latest, began, ended, reason))

    def count_turn(self, task: Task, *, is_pause: bool, waited: float, worked: float) -> None:
        """Counts one turn of the worker. `is_pause`: the turn had no task, only work between two tasks."""
        self.counters.busy_seconds += worked
        training = self.counters.training
        if task in (Task.FORWARD, Task.BACKWARD, Task.LOOKUP):
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
        """Sets the number of microbatches in flight from now on."""
        seconds, in_flight, since = self._flight
        now = time.perf_counter()
        self._flight = (seconds + in_flight * (now - since), microbatches, now)

    @property
    def flight_seconds(self) -> float:
        """Time that microbatches have spent between forward and backward, summed over all so far."""
        seconds, in_flight, since = self._flight
        return seconds + in_flight * (time.perf_counter() - since)

    def close(self) -> None:
        """Stores the flight time in the counters, for the next worker of the stage."""
        self.counters.flight_seconds = self.flight_seconds
        self._flight = (self.counters.flight_seconds, 0, time.perf_counter())
