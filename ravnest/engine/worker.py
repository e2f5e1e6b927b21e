"""Worker of one stage: the thread that owns torch, and the loop that picks its next task.

A pipeline without bubbles is asynchronous: a stage never waits for other stages to finish a step. Its worker runs the
task that the schedule picks from the messages that have arrived (schedule.py), usually backward and forward in turn.
An update follows each backward immediately, so a microbatch's gradient may be applied to newer weights than its forward
used. The number of updates between them is the microbatch's staleness. The limit on microbatches in flight keeps it
low, and the version policy (passes/passes.py) makes the gradient exact for the weights that the backward uses.

    any thread:     feed, receive_forward, receive_backward  ->  Inbox
    worker thread:  Inbox  ->  next_task  ->  StageTasks  ->  Outbox

Work that needs the stage between two tasks (averaging, a save) is queued and has priority.

On failure (a loss that is not finite, any error in torch) the worker calls `Outbox.failed` once, with the number of the
microbatch, and stops. Nothing of that microbatch is applied. A stage that continues after the loss of another machine
gets a new worker with the same `applied` and `counters`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import NamedTuple

import torch

from ravnest.engine.finite_checks.checks import NotFiniteError
from ravnest.engine.finite_checks.origin import StageDiagnosis
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.messages import Message, Outbox
from ravnest.engine.out_of_memory import is_out_of_memory, out_of_memory_text
from ravnest.engine.schedule import Task, next_task
from ravnest.engine.speed.pretended_pace import NO_PRETENCE, Pace, Pretence
from ravnest.engine.stage import Stage
from ravnest.engine.stage_tasks import StageTasks
from ravnest.engine.telemetry.activity import Activity
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.measurements import Measurements
from ravnest.engine.telemetry.spans import WAIT_LIMIT, WAIT_NOTHING
from ravnest.engine.telemetry.training_time import TrainingTime, warm_up_for
from ravnest.errors import error_text

Tensors = Mapping[str, torch.Tensor]


class StageWorker:
    """Runs one stage. Every public method may be called from any thread; only `stop` blocks."""

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
        """`pretence`: the simulated machine, if any. `applied` and `counters`: those of the stage's previous worker,
        which has ended. `announced`: see `Inbox`."""
        self.stage = stage
        self.applied = Applied() if applied is None else applied
        """The microbatches that the stage has applied. Written by the worker's thread while it runs."""
        self.counters = counters or Counters(training=TrainingTime(warm_up_for(stage.settings.in_flight)))
        self.broken = False
        """Whether the worker has failed and left the stage in an unknown state."""
        self._outbox = outbox
        self._inbox = Inbox(stage.graph, stage.settings, self.applied, announced)
        self._changed = self._inbox.changed
        self.pace = Pace(pretence, stage.device, stage.splits_backward)
        self._measurements = Measurements(self.counters, self.pace, outbox.worked)
        self._tasks = StageTasks(stage, outbox, self._inbox, self.applied, self._measurements)
        self._limit = _first_limit(stage)
        self._after = Task.FORWARD
        """Whether the last training task was a forward or a backward."""
        self._saves: deque[_Save] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        """Calls to make between two tasks."""
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
            # The next turn may be far away, and needs none of the values of this one.
            del turn

    def _next_turn(self) -> "_Turn | None":
        """Waits for work; None if the worker has to stop."""
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
            # Saves have priority: a stage that is never idle would never save otherwise.
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
        # The leaf, where the rows come from, holds microbatches back by the same limit.
        is_full |= self._inbox.waits_for_rows
        reason = WAIT_LIMIT if is_full else WAIT_NOTHING
        if not waits or waits[-1][0] != reason:
            waits.append((reason, time.perf_counter()))
        if not self._is_idle:
            self._measurements.begin_wait()
        self._is_idle = True

    def _fail(self, turn: "_Turn", error: Exception) -> None:
        # A cancelled upload does not affect the stage.
        self.broken = not isinstance(error, CancelledError)
        kind = "not_finite" if isinstance(error, NotFiniteError) else "error"
        text = error_text(error)
        if is_out_of_memory(error):
            kind, text = "memory", f"{out_of_memory_text(error)} ({text})"
        self._outbox.failed(kind, text, -1 if turn.message is None else turn.message.microbatch)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stops the thread after its current task."""
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
        """Whether the worker's thread is alive; no other thread may use the stage before it has ended."""
        return self._thread.is_alive()

    def feed(self, message: Message) -> None:
        """Inputs or targets of a microbatch, from the coordinator. PeerError if the message is invalid; MisfitError if
        the activations of the microbatch are."""
        self._inbox.feed(message)

    def receive_forward(self, message: Message) -> None:
        """Activations of a microbatch, from the stage before. PeerError if they are invalid."""
        self._inbox.receive_forward(message)

    def receive_backward(self, message: Message) -> None:
        """Gradients of a microbatch, from the stage after. PeerError if they are invalid or not awaited."""
        self._inbox.receive_backward(message)

    def call_between_tasks(self, call: Callable[[], object]) -> None:
        """Makes this call on the worker's thread before the next task. An exception in it is a failure of the stage."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def take_pending_calls(self) -> list[Callable[[], object]]:
        """Removes and returns the calls that the worker, which has ended, did not make."""
        with self._changed:
            calls = list(self._calls)
            self._calls.clear()
        return calls

    def save(self, checkpoint: int, instead: Tensors | None = None) -> None:
        """Saves the stage's state for this checkpoint before the next task; tensors of `instead` replace or complete
        its own."""
        with self._changed:
            self._saves.append(_Save(checkpoint, instead))
            self._changed.notify()

    def snapshot(self, round: int, fragment: int) -> None:
        """Passes the stage's tensors to a round of averaging before the next task."""
        self.call_between_tasks(lambda: self._tasks.snapshot(round, fragment))

    def start_recomputing(self) -> None:
        """Stops keeping activations between forward and backward, from the next microbatch on."""
        self.call_between_tasks(self.stage.start_recomputing)

    @property
    def limit(self) -> int | None:
        """Maximum number of microbatches in flight here; None: no limit."""
        return self._limit

    def set_limit(self, in_flight: int) -> None:
        """Sets the limit of a stage where microbatches begin, within its settings: a root, and the leaf that looks rows
        up for it. No effect on other stages. Microbatches in flight beyond a lower limit are finished first."""
        largest = self.stage.settings.max_in_flight
        with self._changed:
            if _begins_microbatches(self.stage):
                self._limit = max(1, in_flight if largest is None else min(in_flight, largest))
                self._changed.notify()

    def diagnose(self, microbatch: int) -> StageDiagnosis:
        """The stage's report about a microbatch whose loss or gradients are not finite. To be called between two tasks
        or after the worker has ended."""
        diagnosis = self._tasks.finite.diagnose(self.stage.graph, microbatch, self.stage.diagnose_forward(microbatch))
        if diagnosis.forward.received == "nan" or diagnosis.gradients_received == "nan":
            # The value arose at another stage, and nothing of the microbatch was applied: the state is valid.
            self.broken = False
        return diagnosis

    def activity(self) -> Activity:
        """The worker's current work, or the messages that it waits for; also available while its thread is stuck."""
        kind, microbatch, since = self._measurements.doing
        seconds = time.perf_counter() - since
        return Activity(kind, microbatch, seconds, self._inbox.missing() if kind == "wait" else ())

    @property
    def ready(self) -> int:
        """Number of tasks that are ready, including the current one; 0 while the worker waits. Takes no lock."""
        return 0 if self._is_idle else 1 + self._inbox.ready().total

    @property
    def flight_seconds(self) -> float:
        """Time that microbatches have spent between forward and backward here, summed over all so far."""
        return self._measurements.flight_seconds

    @property
    def overruns(self) -> int:
        """Number of pieces of work that took longer than on the simulated machine."""
        return self.pace.overruns

    def max_held(self) -> int:
        """Maximum number of training microbatches held here at once since the last call."""
        return self._inbox.take_max_held()


class _Save(NamedTuple):
    checkpoint: int
    instead: Tensors | None


class _Turn(NamedTuple):
    """Work of one pass of the worker's loop."""

    task: Task
    message: Message | None
    save: _Save | None
    calls: list[Callable[[], object]]
    waits: list[tuple[str, float]]
    """Reason and start of each wait before this turn."""


def _first_limit(stage: Stage) -> int | None:
    settings = stage.settings
    largest = settings.max_in_flight
    if not _begins_microbatches(stage):
        # Other stages accept all microbatches, up to the bound on staleness.
        return largest
    return settings.in_flight if largest is None else min(settings.in_flight, largest)


def _begins_microbatches(stage: Stage) -> bool:
    return not stage.graph.receives or bool(stage.graph.lookups)
