"""Worker of one stage: the thread that owns torch, and the loop that decides what it does next.

A pipeline without bubbles is asynchronous: a stage never waits for the other stages to finish a step. Its worker takes
whatever the schedule picks from what has arrived (schedule.py): usually a backward and a forward in turn. Each backward
is followed by an update at once, so a microbatch's gradient may be applied to newer weights than its forward used. How
many updates lie between is the microbatch's staleness; the limit on microbatches in flight keeps it low, and the
version policy (passes.py) makes the gradient exact for the weights that the forward saw.

    any thread:     feed, receive_forward, receive_backward  ->  Inbox
    worker thread:  Inbox  ->  next_task  ->  StageTasks  ->  Outbox

Work that needs the stage between two tasks (averaging, a save) is queued and comes first.

On failure (a loss that is not finite, any error in torch) the worker reports once through the outbox, with the number
of the microbatch, and stops. Nothing of that microbatch is applied. When a stage goes on after another machine was
lost, it gets a new worker that inherits `applied` and `counters`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import NamedTuple

import torch

from ravnest.engine.finite_checks.checks import NotFiniteError
from ravnest.engine.finite_checks.origin import Testimony
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.messages import Message, Outbox
from ravnest.engine.out_of_memory import is_out_of_memory, told
from ravnest.engine.schedule import Task, next_task
from ravnest.engine.speed.pace import NO_PRETENCE, Pace, Pretence
from ravnest.engine.stage import Stage
from ravnest.engine.stage_tasks import StageTasks
from ravnest.engine.telemetry.activity import Activity
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.measurements import Measurements
from ravnest.engine.telemetry.spans import WAIT_LIMIT, WAIT_NOTHING
from ravnest.engine.telemetry.training_time import TrainingTime, warm_up_for
from ravnest.errors import RavnestError

Tensors = Mapping[str, torch.Tensor]


class StageWorker:
    """Runs one stage. Every public method may be called from any thread, and only `stop` blocks."""

    def __init__(
        self,
        stage: Stage,
        outbox: Outbox,
        pretence: Pretence = NO_PRETENCE,
        *,
        applied: Applied | None = None,
        counters: Counters | None = None,
        announced: bool = False,
    ) -> None:
        """`pretence`: all work takes as long as on the machine that is simulated. `applied` and `counters` are those of
        the stage's last worker, which has ended. `announced`: see `Inbox`."""
        self.stage = stage
        self.applied = Applied() if applied is None else applied
        """The microbatches that are in the stage's weights. Written by the worker's thread while it runs."""
        self.counters = counters or Counters(training=TrainingTime(warm_up_for(stage.settings.in_flight)))
        self.broken = False
        """Whether the worker has failed in a way that leaves the stage's state unknown."""
        self._outbox = outbox
        self._inbox = Inbox(stage.graph, stage.settings, self.applied, announced)
        self._changed = self._inbox.changed
        self.pace = Pace(pretence, stage.device, stage.splits_backward)
        self._measurements = Measurements(self.counters, self.pace, outbox.worked)
        self._tasks = StageTasks(stage, outbox, self._inbox, self.applied, self._measurements)
        self._limit = _first_limit(stage)
        self._after = Task.FORWARD
        """Which of forward and backward came last."""
        self._saves: deque[_Save] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        """Work for between two tasks."""
        self._is_idle = True
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ravnest-torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            began = time.perf_counter()
            waited = began - turn.waits[0][1] if turn.waits else 0.0
            if turn.message is not None:
                self._measurements.latest = turn.message.microbatch
            self._measurements.record_waits(turn.waits, until=began)
            try:
                self._take(turn)
            except Exception as error:
                self._fail(turn, error)
                return
            finally:
                is_pause = turn.message is None and turn.save is None
                worked = time.perf_counter() - began
                self._measurements.count_turn(turn.task, is_pause=is_pause, waited=waited, worked=worked)

    def _next_turn(self) -> "_Turn | None":
        """Waits until there is something to do; None once the worker is to stop."""
        waits: list[tuple[str, float]] = []
        with self._changed:
            while not self._is_stopping:
                task = self._next_task()
                if task is not Task.WAIT or self._saves or self._calls:
                    self._is_idle = False
                    calls = list(self._calls)
                    self._calls.clear()
                    save = self._saves.popleft() if self._saves else None
                    message = None if task is Task.WAIT else self._inbox.take(task)
                    if task in (Task.FORWARD, Task.BACKWARD):
                        self._after = task
                    return _Turn(task, message, save, calls, waits)
                self._note_wait(waits)
                self._changed.wait()
        return None

    def _next_task(self) -> Task:
        if self._saves:
            # Saves come first: a stage that is never idle would never save.
            return Task.WAIT
        ready = self._inbox.ready()
        return next_task(ready, self.stage.in_flight, self._limit, self._tasks.bound(), self._after).task

    def _take(self, turn: "_Turn") -> None:
        if turn.calls:
            with self._measurements.timed("average"):
                for call in turn.calls:
                    call()
        if turn.save is not None:
            self._tasks.save(turn.save.checkpoint, "after the last update", turn.save.instead)
        if turn.message is not None:
            self._tasks.run(turn.task, turn.message)

    def _note_wait(self, waits: list[tuple[str, float]]) -> None:
        is_full = self._limit is not None and self.stage.in_flight >= self._limit
        reason = WAIT_LIMIT if is_full else WAIT_NOTHING
        if not waits or waits[-1][0] != reason:
            waits.append((reason, time.perf_counter()))
        if not self._is_idle:
            self._measurements.begin_wait()
        self._is_idle = True

    def _recompute(self) -> None:
        self.stage.recompute_from_now_on()

    def _fail(self, turn: "_Turn", error: Exception) -> None:
        # A cancelled upload leaves the stage as it is.
        self.broken = not isinstance(error, CancelledError)
        kind = "not_finite" if isinstance(error, NotFiniteError) else "error"
        text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            kind, text = "memory", f"{told(error)} ({text})"
        self._outbox.failed(kind, text, -1 if turn.message is None else turn.message.microbatch)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the thread after its current task."""
        self.pace.end()
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)
        if not self.runs:
            self._measurements.close()

    @property
    def runs(self) -> bool:
        """Whether the worker's thread is alive: until it has ended, no other thread may touch the stage."""
        return self._thread.is_alive()

    def feed(self, message: Message) -> None:
        """Inputs or targets of a microbatch, from the coordinator. PeerError if the message cannot be right;
        MisfitError if the activations of the microbatch cannot."""
        self._inbox.feed(message)

    def receive_forward(self, message: Message) -> None:
        """Activations of a microbatch, from the stage before. PeerError if they cannot be right."""
        self._inbox.receive_forward(message)

    def receive_backward(self, message: Message) -> None:
        """Gradients of a microbatch, from the stage after. PeerError if the microbatch waits for none."""
        self._inbox.receive_backward(message)

    def between(self, call: Callable[[], None]) -> None:
        """Calls this on the worker's thread before the next task. If it raises, the stage has failed."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def take_left(self) -> list[Callable[[], None]]:
        """The calls that a worker that has ended has not made."""
        with self._changed:
            left = list(self._calls)
            self._calls.clear()
        return left

    def save(self, checkpoint: int, instead: Tensors | None = None) -> None:
        """Saves the stage's state under this number before the next task; the tensors of `instead` replace those of the
        same name, or are saved with them."""
        with self._changed:
            self._saves.append(_Save(checkpoint, instead))
            self._changed.notify()

    def snapshot(self, round: int, fragment: int) -> None:
        """Takes part in a round of averaging while no microbatch is in flight."""
        self.between(lambda: self._tasks.snapshot(round, fragment))

    def recompute_from_now_on(self) -> None:
        """From the next microbatch on, keeps no activations between forward and backward."""
        self.between(self._recompute)

    @property
    def limit(self) -> int | None:
        """How many microbatches may be between forward and backward here; None: no limit."""
        return self._limit

    def set_limit(self, in_flight: int) -> None:
        """Sets the limit of a root, within its settings; other stages take whatever comes. Microbatches beyond a lower
        limit are finished first."""
        largest = self.stage.settings.max_in_flight
        with self._changed:
            if not self.stage.graph.receives:
                self._limit = max(1, in_flight if largest is None else min(in_flight, largest))
                self._changed.notify()

    def testify(self, microbatch: int) -> Testimony:
        """What the stage knows of a microbatch whose loss or gradients are not finite. Call it between two tasks, or
        after the worker has ended."""
        testimony = self._tasks.finite.testify(self.stage.graph, microbatch, self.stage.find_not_finite(microbatch))
        if testimony.forward.received == "nan" or testimony.gradients_received == "nan":
            # Nothing of that microbatch was applied, and this stage's state is not at fault.
            self.broken = False
        return testimony

    def activity(self) -> Activity:
        """What the worker does, or what it waits for; also while its thread is stuck."""
        kind, microbatch, since = self._measurements.doing
        seconds = time.perf_counter() - since
        return Activity(kind, microbatch, seconds, self._inbox.missing() if kind == "wait" else ())

    @property
    def ready(self) -> int:
        """Tasks here, the current one included; 0 while the worker waits. Takes no lock."""
        return 0 if self._is_idle else 1 + sum(self._inbox.ready())

    @property
    def flight_seconds(self) -> float:
        """Time that all microbatches so far have been between forward and backward here, summed."""
        return self._measurements.flight_seconds

    @property
    def overruns(self) -> int:
        """Pieces of work that took longer than the machine that is simulated would have taken."""
        return self.pace.overruns

    def max_held(self) -> int:
        """The largest number of training microbatches that were here at once since the last call."""
        return self._inbox.take_max_held()


class _Save(NamedTuple):
    checkpoint: int
    instead: Tensors | None


class _Turn(NamedTuple):
    """What the worker does before it looks for the next task again."""

    task: Task
    message: Message | None
    save: _Save | None
    calls: list[Callable[[], None]]
    waits: list[tuple[str, float]]
    """Why the worker waited before this turn, and since when."""


def _first_limit(stage: Stage) -> int | None:
    settings = stage.settings
    largest = settings.max_in_flight
    if stage.graph.receives:
        # The stages after a root take whatever comes, up to the bound on staleness.
        return largest
    return settings.in_flight if largest is None else min(settings.in_flight, largest)
