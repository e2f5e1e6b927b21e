"""Tasks of one stage: forward, backward, update and evaluation of a microbatch, from its message to its results.

A microbatch that the stage has applied before (another stage was lost, and needs it again) is computed, and leaves
nothing behind here: no update, no loss, no snapshot.

On failure a task raises, nothing of its microbatch is applied, and the stage must not be used any further.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ravnest.engine.finite_checks.checks import FiniteChecks
from ravnest.engine.finite_checks.device_read import start_reading
from ravnest.engine.inbox.agreement import shapes_of
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.messages import LossRecord, Message, Outbox, Snapshot
from ravnest.engine.schedule import Bound, Task, updates_before
from ravnest.engine.stage import Stage
from ravnest.engine.telemetry.measurements import Measurements

Tensors = Mapping[str, torch.Tensor]


class StageTasks:
    """Used on the worker's thread alone."""

    def __init__(
        self, stage: Stage, outbox: Outbox, inbox: Inbox, applied: Applied, measurements: Measurements
    ) -> None:
        self.finite = FiniteChecks()
        self._stage = stage
        self._outbox = outbox
        self._inbox = inbox
        self._applied = applied
        self._measurements = measurements
        self._counters = measurements.counters
        self._is_root = not stage.graph.receives
        self._is_leaf = stage.graph.loss is not None
        self._in_flight: dict[int, Message] = {}
        """Training microbatches between forward and backward, without their values."""
        self._summed: list[Message] = []
        """Microbatches whose gradients wait for others, to make one update with them."""

    def run(self, task: Task, message: Message) -> None:
        if task is Task.FORWARD:
            self._forward(message)
        elif task is Task.BACKWARD:
            origin = self._in_flight.pop(message.microbatch, message)
            self._measurements.count_in_flight(len(self._in_flight))
            # The marks are those of the forward: the stage after might have changed them.
            self._backward(origin.with_values(message.values), message.values)
        elif task is Task.EVALUATE:
            self._evaluate(message)

    def bound(self) -> Bound:
        """How stale the next forward would become, if the stage has a bound on that."""
        settings = self._stage.settings
        if settings.max_staleness is None:
            return Bound()
        flushes = (each.marks.flush for number, each in self._in_flight.items() if number not in self._applied)
        return Bound(updates_before(len(self._summed), settings.accumulate, flushes), settings.max_staleness)

    def save(self, checkpoint: int, when: str, instead: Tensors | None = None) -> None:
        """Saves the stage's state under this number; the tensors of `instead` replace or complete its own."""
        tensors, metadata = self._stage.state()
        tensors |= instead or {}
        self.finite.check_saved(tensors, when)
        with self._measurements.timed("save"):
            self._outbox.save(checkpoint, tensors, metadata)

    def snapshot(self, round: int, fragment: int) -> None:
        """Hands the stage's tensors to a round of averaging."""
        stage = self._stage
        self._outbox.snapshot(Snapshot(round, fragment, stage.version, self._counters.samples, stage.state_tensors()))

    def _forward(self, message: Message) -> None:
        number = message.microbatch
        with self._measurements.work("forward", number):
            results = self._stage.forward(number, message.values, again=number in self._applied)
        self._counters.forwards += 1
        if self._is_leaf:
            loss = start_reading(results[str(self._stage.graph.loss)])
            self._backward(message, None, loss)
            return
        self._in_flight[number] = message.with_values({})
        self._measurements.count_in_flight(len(self._in_flight))
        self._inbox.await_gradients(number, shapes_of(results, results))
        self._outbox.forward(message.with_values(results))

    def _backward(self, message: Message, gradients: Tensors | None, loss: Callable[[], float] | None = None) -> None:
        number = message.microbatch
        with self._measurements.work("backward", number):
            are_finite = self.finite.start(gradients)
            found = self._stage.backward(number, gradients)
            # The answers are read only now: the GPU has the backward to do in the meantime.
            self.finite.check_gradients(number, are_finite)
            if loss is not None:
                self._report_loss(message, loss())
        self._counters.backwards += 1
        if not self._is_root:
            # Before the update: the stage before works on these gradients while this stage updates its weights.
            self.finite.note_sent(number, found)
            self._outbox.backward(message.with_values(found))
        if number not in self._applied:
            self._apply(message)
        elif message.marks.flush and self._summed:
            self._update(message)
        if self._is_root:
            self._outbox.done(message.with_values({}))

    def _report_loss(self, message: Message, loss: float) -> None:
        self.finite.check_loss(message.microbatch, loss)
        if message.microbatch not in self._applied:
            self._outbox.trained(LossRecord(message.microbatch, loss, message.marks.samples))

    def _apply(self, message: Message) -> None:
        """Everything that is done only once with a microbatch, after its backward."""
        marks = message.marks
        if self._stage.splits_backward:
            with self._measurements.work("weights", message.microbatch):
                self._stage.finish_backward()
        if marks.round:
            self.snapshot(marks.round, marks.fragment)
        self._summed.append(message.with_values({}))
        self._update(message)
        if marks.replica:
            self._replicate(marks.replica)
        if marks.checkpoint:
            self.save(marks.checkpoint, f"after microbatch {message.microbatch}")

    def _update(self, message: Message) -> None:
        marks = message.marks
        with self._measurements.work("update", message.microbatch):
            update = self._stage.update(message.microbatch, flush=marks.flush, updates=marks.updates)
        if update is not None:
            self._applied.add(each.microbatch for each in self._summed)
            self._counters.samples += sum(each.marks.samples for each in self._summed)
            self._summed.clear()
            self._measurements.count_update(update.staleness)
            self._outbox.updated(update)

    def _replicate(self, replica: int) -> None:
        tensors, metadata = self._stage.state()
        metadata["applied"] = json.dumps(self._applied.numbers())
        metadata["samples"] = json.dumps(self._counters.samples)
        with self._measurements.timed("save"):
            self._outbox.keep(replica, tensors, metadata)

    def _evaluate(self, message: Message) -> None:
        with self._measurements.work("evaluate", message.microbatch):
            results = self._stage.evaluate(message.values, message.microbatch)
        self._counters.forwards += 1
        if not self._is_leaf:
            self._outbox.forward(message.with_values(results))
            return
        graph = self._stage.graph
        scores: dict[str, Any] = {"loss": float(results[str(graph.loss)])}
        scores.update({metric: float(results[value]) for metric, value in graph.metrics.items()})
        self._outbox.evaluated(message.with_values(scores))
