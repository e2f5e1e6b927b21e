"""The thread that owns torch for one stage: takes what is ready as the schedule says, waits on a condition.

What happens on failure: a loss that is not finite, or any error in torch, is reported once through the outbox with the
microbatch's number; nothing of that microbatch is applied, and the worker takes no more work. A microbatch or a
gradient that cannot be (again, out of order, never asked for, too many) is refused with a PeerError as it is
handed in.

A stage that goes on after a machine was lost gets a new worker, which is told what has been applied. What comes again
of that is computed, since other stages may need it, and leaves nothing behind: no update, no loss, no snapshot.
"""

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Final

import torch

from ravnest.engine.activity import Activity, what_is_missing
from ravnest.engine.agreement import MisfitError, Shapes, backward_misfit, feed_misfit, forward_misfit, shapes_of
from ravnest.engine.applied import Applied
from ravnest.engine.early_number import asked_for
from ravnest.engine.messages import WAIT_LIMIT, WAIT_NOTHING, Counters, LossRecord, Message, Outbox, Snapshot, Span
from ravnest.engine.not_finite import Finding, Testimony, all_finite, steep
from ravnest.engine.out_of_memory import is_out_of_memory, told
from ravnest.engine.schedule import Bound, Task, Waiting, next_task, updates_before
from ravnest.engine.speed.pace import NO_PRETENCE, Pace, Pretence
from ravnest.engine.stage import Stage, Update
from ravnest.engine.training_time import TrainingTime, warm_up_for
from ravnest.errors import PeerError, RavnestError
from ravnest.microbatch import Marks

Tensors = Mapping[str, torch.Tensor]

_SPARE_WAITING: Final = 64
"""How many microbatches may wait beyond a few times those in flight: more come only from a peer that means harm."""
_TESTIFIED: Final = 64
"""Microbatches of which it is remembered whether the gradients that were sent are finite."""
_REMEMBERED: Final = 4096
"""Microbatches that were taken up, by number: one as far behind the newest is not taken any more. What another cluster
left undone comes again here, a little behind those that were fed meanwhile."""


class StageWorker:
    """Runs one stage. `feed`, `receive_forward`, `receive_backward` may be called from any thread and never block."""

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
        """All its work takes as long as on the machine that is pretended. `applied` and `counters` are those of the
        worker that had the stage before, which has ended; it counts on in both. Where every microbatch is `announced`,
        the coordinator feeds this stage also where it has no inputs, and nothing is computed before."""
        self.applied = Applied() if applied is None else applied
        """What the stage has applied. The worker's own while it runs."""
        if counters is None:
            counters = Counters(training=TrainingTime(warm_up_for(stage.settings.in_flight)))
        self.counters = counters
        # Until there is something to train on again, the stage stands still.
        counters.training.stood_still()
        self.broken = False
        """Whether it has failed, so that nobody knows what is in the stage."""
        self._pace = Pace(pretence, stage.device, stage.splits_backward)
        self._stage = stage
        self._outbox = outbox
        graph = stage.graph
        self._is_root = not graph.receives
        self._needs_forward = not self._is_root
        # A root is fed even where it needs nothing of the batch: the empty frame says that there is a microbatch.
        self._needs_feed = self._is_root or announced or bool(graph.inputs)
        self._is_leaf = graph.loss is not None
        settings = stage.settings
        most = settings.max_in_flight
        # The stages after a root take whatever comes, up to the bound on staleness.
        self._limit = settings.in_flight if self._is_root else most
        if self._limit is not None and most is not None:
            self._limit = min(self._limit, most)
        self._summed: list[Message] = []
        """Microbatches whose gradients wait for others to be applied with them."""
        self._condition = threading.Condition()
        self._max_waiting = _SPARE_WAITING + 4 * stage.settings.in_flight
        self._fed: dict[int, Message] = {}
        self._received: dict[int, Message] = {}
        """Halves of a microbatch that wait for the other half, by where they came from."""
        self._taken = {True: _Taken(), False: _Taken()}
        """The microbatches that were taken up, in training and in evaluation."""
        self._awaited: dict[int, Shapes] = {}
        """Microbatches that were sent on in training and whose gradients have not come yet, with the shapes that were
        sent."""
        self._forwards: deque[Message] = deque()
        self._evaluations: deque[Message] = deque()
        self._backwards: deque[Message] = deque()
        self._after = Task.FORWARD
        """What of forward and backward came last."""
        self._saves: deque[tuple[int, Tensors]] = deque()
        self._between: deque[Callable[[], None]] = deque()
        self._idle = True
        """Whether it waits for something to do."""
        self._doing = ("wait", -1, time.perf_counter())
        """What the thread does, with which microbatch, and since when."""
        self._max_held = 0
        self._sent_finite: dict[int, list[Callable[[], float]]] = {}
        """Of the microbatches whose gradients were sent last, whether those are finite."""
        self._bad_gradients: set[int] = set()
        """Microbatches whose gradients came and are not finite."""
        self._running: dict[int, Message] = {}
        self._flown = (counters.flight_seconds, 0, time.perf_counter())
        """Seconds that microbatches were between forward and backward, up to a moment, and how many are since then."""
        self._latest = -1
        """The microbatch of the last task: what happens between two tasks is recorded with it."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ravnest-torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the thread after the task at hand."""
        self._pace.end()
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)
        if not self.runs:
            self.counters.flight_seconds = self.flight_seconds
            self._flown = (self.counters.flight_seconds, 0, time.perf_counter())

    @property
    def runs(self) -> bool:
        """Whether its thread is there: until then nobody else may touch the stage."""
        return self._thread.is_alive()

    def take_left(self) -> list[Callable[[], None]]:
        """What was to be done between two tasks and has not been. Of a worker that has ended."""
        with self._condition:
            left = list(self._between)
            self._between.clear()
        return left

    @property
    def overruns(self) -> int:
        """Pieces of work that took longer than was pretended."""
        return self._pace.overruns

    def feed(self, message: Message) -> None:
        """Inputs or targets of a microbatch, from the coordinator. PeerError for one that cannot be; MisfitError where
        what the stage before has sent of it cannot."""
        if wrong := feed_misfit(self._stage.graph, message):
            raise PeerError(wrong)
        self._join(message, self._fed, self._received if self._needs_forward else None)

    def receive_forward(self, message: Message) -> None:
        """Activations of a microbatch, from the stage before. PeerError for one that cannot be."""
        self._join(message, self._received, self._fed if self._needs_feed else None)

    def receive_backward(self, message: Message) -> None:
        """Gradients of a microbatch, from the stage after. PeerError for one that is not waited for."""
        with self._condition:
            if message.microbatch not in self._awaited:
                raise PeerError(f"gradients of microbatch {message.microbatch} came, which no stage here waits for")
            if wrong := backward_misfit(self._awaited[message.microbatch], message):
                raise PeerError(wrong)
            del self._awaited[message.microbatch]
            self._backwards.append(message)
            self._condition.notify()

    @property
    def flight_seconds(self) -> float:
        """What all microbatches so far spent between forward and backward here, together. From any thread."""
        seconds, flying, since = self._flown
        return seconds + flying * (time.perf_counter() - since)

    def max_held(self) -> int:
        """Of how many microbatches something was held here at once, at most since the last call. From any thread."""
        with self._condition:
            now = self._held()
            most, self._max_held = max(now, self._max_held), now
        return most

    def recompute_from_now_on(self) -> None:
        """Keep no activations from the next microbatch on. From any thread."""
        self.between(self._recompute)

    @property
    def ready(self) -> int:
        """How many pieces of work lie here while it works on one, that one included; 0 while it waits for some. From
        any thread, also while the one that works is stuck: nothing is waited for."""
        return 0 if self._idle else 1 + len(self._backwards) + len(self._forwards) + len(self._evaluations)

    def activity(self) -> Activity:
        """What the stage does, or what it waits for. From any thread, also while the one that works is stuck."""
        kind, microbatch, since = self._doing
        seconds = time.perf_counter() - since
        if kind != "wait":
            return Activity(kind, microbatch, seconds)
        with self._condition:
            missing = what_is_missing(
                fed=self._fed,
                received=self._received,
                awaited=self._awaited,
                needs_feed=self._needs_feed,
                needs_forward=self._needs_forward,
            )
        return Activity(kind, microbatch, seconds, missing)

    @property
    def limit(self) -> int | None:
        """How many microbatches may be between forward and backward here; None: whatever comes."""
        return self._limit

    def set_limit(self, in_flight: int) -> None:
        """From now on a root has so many microbatches between forward and backward, and never more than its settings
        allow. Those that are under way beyond a lower limit come back first. From any thread."""
        most = self._stage.settings.max_in_flight
        with self._condition:
            if self._is_root:
                self._limit = max(1, in_flight if most is None else min(in_flight, most))
                self._condition.notify()

    def save(self, checkpoint: int, instead: Tensors | None = None) -> None:
        """Save the stage's state under this number before the next task, with these tensors in place of its own of the
        same names, or beside them."""
        with self._condition:
            self._saves.append((checkpoint, instead or {}))
            self._condition.notify()

    def snapshot(self, round: int, fragment: int) -> None:
        """Take part in a round of averaging as things stand; nothing is in flight."""
        self.between(lambda: self._snapshot(round, fragment))

    def between(self, work: Callable[[], None]) -> None:
        """Do this before the next task, on the thread that owns torch; a failure of it is one of the stage."""
        with self._condition:
            self._between.append(work)
            self._condition.notify()

    def testify(self, microbatch: int) -> Testimony:
        """What the stage knows of a microbatch whose loss or gradients are not finite. Only where nothing else is done:
        between two tasks, or once the worker has ended."""
        found = self._stage.find_not_finite(microbatch) or Finding()
        sent, received = "", ""
        if microbatch in self._sent_finite:
            # What it got is looked at before anything is sent on.
            received = "" if self._is_leaf else "finite"
            sent = "finite" if all(is_finite() for is_finite in self._sent_finite[microbatch]) else "nan"
        elif microbatch in self._bad_gradients:
            received = "nan"
        if found.received == "nan" or received == "nan":
            # Nothing of that microbatch was applied, and what is in the stage is not at fault.
            self.broken = False
        return Testimony(found, received, sent, steep(self._stage.graph))

    def _recompute(self) -> None:
        self._stage.recompute_from_now_on()

    def _held(self) -> int:
        return len(self._forwards) + len(self._awaited) + len(self._backwards)

    def _join(self, message: Message, own: dict[int, Message], others: dict[int, Message] | None) -> None:
        """Takes one half of a microbatch (or all of it, where no other half is needed: `others` is None)."""
        number = message.microbatch
        with self._condition:
            # Training counts up from 0 and evaluation down from -1: nothing is ever taken up twice.
            known = not message.marks.train or self.applied.is_known(number)
            if number in own or not known or not self._taken[message.marks.train].may_take(abs(number)):
                raise PeerError(f"microbatch {number} came again, or long after one that was fed later")
            waiting = len(self._fed) + len(self._received) + len(self._forwards) + len(self._evaluations)
            # What was sent on and not answered counts too: else a stem would pass a flood on, and be blamed for it.
            waiting += len(self._awaited)
            if waiting >= self._max_waiting:
                raise PeerError(f"{waiting} microbatches wait here already, more than can be in flight")
            if others is not None:
                other = others.pop(number, None)
                if other is None:
                    own[number] = message
                    return
                fed, received = (message, other) if own is self._fed else (other, message)
                if wrong := forward_misfit(self._stage.graph, fed, received):
                    raise MisfitError(wrong)
                message = replace(fed, values={**fed.values, **received.values})
            self._taken[message.marks.train].take(abs(number))
            (self._forwards if message.marks.train else self._evaluations).append(message)
            self._max_held = max(self._max_held, self._held())
            self._condition.notify()

    def _run(self) -> None:
        while True:
            waits: list[tuple[str, float]] = []
            with self._condition:
                while True:
                    if self._stopping:
                        return
                    waiting = Waiting(len(self._backwards), len(self._forwards), len(self._evaluations))
                    task = next_task(waiting, self._stage.in_flight, self._limit, self._bound(), self._after).task
                    if self._saves:
                        # Not once nothing else is ready: a stage that is never idle would never save.
                        task = Task.WAIT
                    if task is not Task.WAIT or self._saves or self._between:
                        break
                    held_up = self._limit is not None and self._stage.in_flight >= self._limit
                    why = WAIT_LIMIT if held_up else WAIT_NOTHING
                    if not waits or waits[-1][0] != why:
                        waits.append((why, time.perf_counter()))
                    if not self._idle:
                        self._doing = ("wait", self._latest, time.perf_counter())
                    self._idle = True
                    self._condition.wait()
                self._idle = False
                first = list(self._between)
                self._between.clear()
                message = self._take(task) if task is not Task.WAIT or self._saves else _NOTHING
            started = time.perf_counter()
            trains = task in (Task.FORWARD, Task.BACKWARD)
            if trains:
                self._after = task
            if trains or task is Task.EVALUATE:
                self._latest = message.microbatch
            self._tell_waits(waits, started)
            try:
                if first:
                    with self._timed("average", self._latest):
                        for work in first:
                            work()
                if message is not _NOTHING:
                    self._execute(task, message)
            except Exception as error:
                self._give_up(message, error)
                return
            finally:
                worked = time.perf_counter() - started
                self.counters.busy_seconds += worked
                waited = started - waits[0][1] if waits else 0.0
                if trains:
                    self.counters.training.trained(waited, worked, self.counters.backwards)
                elif message is _NOTHING:
                    self.counters.training.paused(waited, worked)
                else:
                    self.counters.training.stood_still()

    def _tell_waits(self, waits: list[tuple[str, float]], until: float) -> None:
        for index, (why, began) in enumerate(waits):
            ended = waits[index + 1][1] if index + 1 < len(waits) else until
            self._outbox.worked(Span("wait", self._latest, began, ended, why))

    def _bound(self) -> Bound:
        settings = self._stage.settings
        if settings.max_staleness is None:
            return Bound()
        flushes = (message.marks.flush for number, message in self._running.items() if number not in self.applied)
        return Bound(updates_before(len(self._summed), settings.accumulate, flushes), settings.max_staleness)

    def _take(self, task: Task) -> Message:
        if task is Task.WAIT:
            checkpoint, instead = self._saves.popleft()
            return Message(-1, instead, marks=Marks(checkpoint=checkpoint))
        queue = {Task.BACKWARD: self._backwards, Task.FORWARD: self._forwards, Task.EVALUATE: self._evaluations}
        return queue[task].popleft()

    def _execute(self, task: Task, message: Message) -> None:
        if task is Task.FORWARD:
            self._forward(message)
        elif task is Task.BACKWARD:
            origin = self._running.pop(message.microbatch, message)
            self._count_flying()
            self._backward(replace(origin, values=message.values), message.values)
        elif task is Task.EVALUATE:
            self._evaluate(message)
        else:
            self._save(message.marks.checkpoint, "after the last update", message.values)

    def _forward(self, message: Message) -> None:
        with self._work("forward", message.microbatch):
            again = message.microbatch in self.applied
            results = self._stage.forward(message.microbatch, message.values, again=again)
        self.counters.forwards += 1
        if not self._is_leaf:
            self._running[message.microbatch] = replace(message, values={})
            self._count_flying()
            with self._condition:
                self._awaited[message.microbatch] = shapes_of(results, results)
            self._outbox.forward(replace(message, values=results))
            return
        self._backward(message, None, asked_for(results[str(self._stage.graph.loss)]))

    def _backward(
        self, message: Message, gradients: Mapping[str, torch.Tensor] | None, loss: Callable[[], float] | None = None
    ) -> None:
        with self._work("backward", message.microbatch):
            are_finite = {name: asked_for(all_finite(g)) for name, g in (gradients or {}).items()}
            found = self._stage.backward(message.microbatch, gradients)
            # Not before: a GPU has the backward to do while this waits for what came ahead of it.
            self._check_gradients(message.microbatch, are_finite)
            if loss is not None:
                self._take_loss(message, loss())
        self.counters.backwards += 1
        if not self._is_root:
            # Before the update: the stage before can work on it meanwhile.
            self._note_gradients(message.microbatch, found)
            self._outbox.backward(replace(message, values=found))
        if message.microbatch not in self.applied:
            self._apply(message)
        elif message.marks.flush and self._summed:
            self._update(message)
        if self._is_root:
            self._outbox.done(replace(message, values={}))

    def _apply(self, message: Message) -> None:
        """What is done once with every microbatch, after its backward."""
        if self._stage.splits_backward:
            with self._work("weights", message.microbatch):
                self._stage.finish_backward()
        if message.marks.round:
            self._snapshot(message.marks.round, message.marks.fragment)
        self._summed.append(replace(message, values={}))
        self._update(message)
        if message.marks.replica:
            self._keep(message.marks.replica)
        if message.marks.checkpoint:
            self._save(message.marks.checkpoint, f"after microbatch {message.microbatch}")

    def _update(self, message: Message) -> None:
        with self._work("update", message.microbatch):
            update = self._stage.update(message.microbatch, flush=message.marks.flush, updates=message.marks.updates)
        if update is not None:
            self.applied.add(each.microbatch for each in self._summed)
            self.counters.samples += sum(each.marks.samples for each in self._summed)
            self._summed.clear()
            self._count(update)

    def _take_loss(self, message: Message, loss: float) -> None:
        if not math.isfinite(loss):
            # Nothing is applied, and the worker ends with it.
            raise _NotFiniteError(
                f"the loss of microbatch {message.microbatch} is {loss}; lower the learning rate, "
                "set pipeline.clip_norm, or check that microbatch's data"
            )
        if message.microbatch not in self.applied:
            self._outbox.trained(LossRecord(message.microbatch, loss, message.marks.samples))

    @contextlib.contextmanager
    def _work(self, kind: str, microbatch: int) -> Iterator[None]:
        """A piece of work: at the machine's pace, counted, and recorded."""
        with self._timed(kind, microbatch), self._pace.work(kind):
            yield

    @contextlib.contextmanager
    def _timed(self, kind: str, microbatch: int) -> Iterator[None]:
        began = time.perf_counter()
        self._doing = (kind, microbatch, began)
        yield
        ended = time.perf_counter()
        spent = self.counters.seconds
        spent[kind] = spent.get(kind, 0.0) + ended - began
        self._outbox.worked(Span(kind, microbatch, began, ended))

    def _check_gradients(self, microbatch: int, are_finite: Mapping[str, Callable[[], float]]) -> None:
        for name, is_finite in are_finite.items():
            if not is_finite():
                # Before anything is applied or sent: the weights stay as they are, and the worker ends with it.
                self._bad_gradients.add(microbatch)
                raise _NotFiniteError(
                    f"the gradient of {name} that the next stage sent for microbatch {microbatch} is not "
                    "finite, so it is not applied; lower the learning rate or set pipeline.clip_norm"
                )

    def _note_gradients(self, microbatch: int, gradients: Tensors) -> None:
        """Remembers whether what is sent is finite, without waiting for it: the question arises only where a loss or a
        gradient is not."""
        self._sent_finite[microbatch] = [asked_for(all_finite(g)) for g in gradients.values()]
        while len(self._sent_finite) > _TESTIFIED:
            self._sent_finite.pop(next(iter(self._sent_finite)))

    def _snapshot(self, round: int, fragment: int) -> None:
        stage = self._stage
        self._outbox.snapshot(Snapshot(round, fragment, stage.version, self.counters.samples, stage.state_tensors()))

    def _keep(self, replica: int) -> None:
        tensors, metadata = self._stage.state()
        metadata["applied"] = json.dumps(self.applied.numbers())
        metadata["samples"] = json.dumps(self.counters.samples)
        with self._timed("save", self._latest):
            self._outbox.keep(replica, tensors, metadata)

    def _save(self, checkpoint: int, when: str, instead: Tensors | None = None) -> None:
        tensors, metadata = self._stage.state()
        tensors |= instead or {}
        for name, tensor in tensors.items():
            if name.startswith(("param:", "outer:")) and not torch.isfinite(tensor).all():
                raise _NotFiniteError(
                    f"the parameter {name.partition(':')[2]} is not finite {when}, so it is not saved; "
                    "lower the learning rate or set pipeline.clip_norm"
                )
        with self._timed("save", self._latest):
            self._outbox.save(checkpoint, tensors, metadata)

    def _count_flying(self) -> None:
        seconds, flying, since = self._flown
        now = time.perf_counter()
        self._flown = (seconds + flying * (now - since), len(self._running), now)

    def _count(self, update: Update) -> None:
        self.counters.updates += 1
        counts = self.counters.staleness
        counts[update.staleness] = counts.get(update.staleness, 0) + 1
        self._outbox.updated(update)

    def _evaluate(self, message: Message) -> None:
        with self._work("evaluate", message.microbatch):
            results = self._stage.evaluate(message.values, message.microbatch)
        self.counters.forwards += 1
        if not self._is_leaf:
            self._outbox.forward(replace(message, values=results))
            return
        graph = self._stage.graph
        scores: dict[str, Any] = {"loss": float(results[str(graph.loss)])}
        scores.update({metric: float(results[value]) for metric, value in graph.metrics.items()})
        self._outbox.evaluated(replace(message, values=scores))

    def _give_up(self, message: Message, error: Exception) -> None:
        # An upload that was given up, because the stage is, leaves the stage as it is.
        self.broken = not isinstance(error, CancelledError)
        kind = "not_finite" if isinstance(error, _NotFiniteError) else "error"
        text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            kind, text = "memory", f"{told(error)} ({text})"
        self._outbox.failed(kind, text, message.microbatch)


class _Taken:
    """Which microbatches were taken up, of those that may still come."""

    def __init__(self) -> None:
        self._newest = -1
        self._numbers: set[int] = set()

    def may_take(self, number: int) -> bool:
        return number not in self._numbers and number > self._newest - _REMEMBERED

    def take(self, number: int) -> None:
        self._numbers.add(number)
        self._newest = max(self._newest, number)
        if len(self._numbers) > 2 * _REMEMBERED:
            self._numbers = {each for each in self._numbers if each > self._newest - _REMEMBERED}


_NOTHING = Message(-1, {})


class _NotFiniteError(RavnestError):
    """The loss of a microbatch or a parameter is not a finite number."""
