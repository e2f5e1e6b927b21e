"""Tasks of one stage: forward, backward, update and evaluation of a microbatch, from its message to its results.

A microbatch that this stage has applied before is replayed when another stage was lost and needs it. It is computed
again, but causes no update, loss or snapshot here.

On failure a task raises, nothing of its microbatch is applied, and the stage must not be used any more.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ravnest.engine.finite_checks.checks import FiniteChecks
from ravnest.engine.finite_checks.device_read import start_reading
from ravnest.engine.inbox.agreement import shapes_of
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.inbox.row_returns import RowReturns
from ravnest.engine.messages import LossRecord, Message, Outbox, Snapshot
from ravnest.engine.schedule import Bound, Task, updates_before
from ravnest.engine.stage import Stage
from ravnest.engine.telemetry.measurements import Measurements

Tensors = Mapping[str, torch.Tensor]


class StageTasks:
    """The tasks of one worker; used on its thread only."""

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
        self._is_first = not stage.graph.from_stages
        """Whether no stage waits for gradients of this one."""
        self._is_leaf = stage.graph.loss is not None
        self._in_flight: dict[int, Message] = {}
        """Training microbatches between forward and backward, without their values."""
        self._summed: list[Message] = []
        """Microbatches whose gradients are summed but not yet applied, without their values."""
        self._rows = RowReturns() if stage.graph.lookups else None
        """On a leaf that looks rows up for the root: what became of them."""

    def run(self, task: Task, message: Message) -> None:
        if task is Task.LOOKUP:
            self._look_up(message)
        elif task is Task.FORWARD:
            self._forward(message)
        elif task is Task.BACKWARD and self._rows is not None:
            self._take_rows(self._rows, message)
        elif task is Task.BACKWARD:
            origin = self._in_flight.pop(message.microbatch, message)
            self._measurements.count_in_flight(len(self._in_flight))
            # Use the marks of the forward: the stage after may have changed its own.
            self._backward(origin.with_values(message.values), message.values)
        elif task is Task.EVALUATE:
            self._evaluate(message)

    def bound(self) -> Bound:
        """The staleness that the next forward would have at its backward, and the maximum allowed. On a leaf that looks
        rows up: the largest that the rows of the next lookup may have when their gradients are applied."""
        settings = self._stage.settings
        if settings.max_staleness is None:
            return Bound()
        summed = {each.microbatch for each in self._summed}
        begun = self._in_flight if self._rows is None else self._rows.not_in(summed)
        flushes = (each.marks.flush for number, each in begun.items() if number not in self._applied)
        updates = updates_before(len(self._summed), settings.accumulate, flushes)
        if self._rows is not None and updates:
            # The microbatches before it make these updates. While their rows come back, those after it begin, which may
            # make as many; and rows that come back between two updates wait for the second.
            updates = 2 * updates + 1
        return Bound(updates, settings.max_staleness)

    def save(self, checkpoint: int, when: str, instead: Tensors | None = None) -> None:
        """Saves the stage's state for this checkpoint; tensors of `instead` replace or complete its own. `when` names
        the last step before it, for error messages."""
        tensors, metadata = self._stage.state()
        tensors |= instead or {}
        self.finite.check_saved(tensors, when)
        with self._measurements.timed("save"):
            self._outbox.save(checkpoint, tensors, metadata)

    def snapshot(self, round: int, fragment: int) -> None:
        """Passes the stage's tensors to a round of averaging."""
        stage = self._stage
        self._outbox.snapshot(Snapshot(round, fragment, stage.version, self._counters.samples, stage.state_tensors()))

    def _look_up(self, message: Message) -> None:
        """Looks up the rows with which a microbatch begins at the root."""
        number = message.microbatch
        train = message.marks.train
        self._apply_held()
        with self._measurements.work("lookup", number):
            rows = self._stage.look_up(number, message.values, train=train)
        if train and self._rows is not None:
            self._rows.begin(message, shapes_of(rows, rows))
            self._measurements.count_in_flight(self._stage.in_flight)
        self._outbox.forward(message.with_values(rows))

    def _take_rows(self, rows: RowReturns, message: Message) -> None:
        """Takes the gradients of the rows of a microbatch, which every stage has computed now."""
        number = message.microbatch
        with self._measurements.work("rows", number):
            self.finite.check_gradients(number, self.finite.start(message.values))
            self._stage.add_row_gradients(number, message.values, again=number in self._applied)
        origin = rows.take(number)
        self._measurements.count_in_flight(self._stage.in_flight)
        if rows.held is not None and (rows.held.microbatch == number or rows.more_to_pass):
            # Also if these are the rows of an earlier microbatch: it is done then, and the rows of the held one come to
            # the next update.
            self._apply_held()
        elif rows.are_last:
            # A replay: no further update of this stage's own gradients would include them.
            if rows.lacking(self._applied):
                self._update(origin.with_marks(replace(origin.marks, flush=True)))
                # No update is made if the rows had no gradients.
                rows.applied([], self._applied)
            self._end(rows)

    def _apply_held(self) -> None:
        """Makes the update that waits for the gradients of rows, with those that have arrived."""
        if self._rows is None or self._rows.held is None:
            return
        message, self._rows.held = self._rows.held, None
        self._complete(message)
        self._end(self._rows)

    def _end(self, rows: RowReturns) -> None:
        """Reports the microbatches whose gradients of rows were taken: their last pass is over."""
        for message in rows.pop_taken():
            self._outbox.done(message)

    def _forward(self, message: Message) -> None:
        number = message.microbatch
        self._apply_held()
        if self._rows is not None:
            # No gradient of the rows can come before the backward of this pass.
            self._inbox.await_gradients(number, self._rows.passed(number))
        with self._measurements.work("forward", number):
            results = self._stage.forward(number, message.values, again=self._applied.has_own(number))
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
            # The results are read only now, while the GPU computes the backward.
            self.finite.check_gradients(number, are_finite)
            if loss is not None:
                self._report_loss(message, loss())
        self._counters.backwards += 1
        if not self._is_first:
            # Before the update, so that the stage before can work on these gradients during the update.
            self.finite.note_sent(number, found)
            self._outbox.backward(message.with_values(found))
        if not self._applied.has_own(number):
            self._apply(message)
        elif message.marks.flush and self._summed:
            self._update(message)
        if self._is_first:
            self._outbox.done(message.with_values({}))

    def _report_loss(self, message: Message, loss: float) -> None:
        self.finite.check_loss(message.microbatch, loss)
        if not self._applied.has_own(message.microbatch):
            self._outbox.trained(LossRecord(message.microbatch, loss, message.marks.samples))

    def _apply(self, message: Message) -> None:
        """Applies a microbatch after its backward: everything that must happen only once for a microbatch."""
        if self._stage.splits_backward:
            with self._measurements.work("weights", message.microbatch):
                self._stage.finish_backward()
        if self._rows is None:
            self._complete(message)
        else:
            # With one microbatch in flight, its rows come back next: the update then has its whole gradient.
            self._rows.held = message.with_values({})

    def _complete(self, message: Message) -> None:
        """Applies a microbatch whose gradients are summed, and does what its marks say."""
        marks = message.marks
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
            applied = [each.microbatch for each in self._summed]
            if self._rows is None:
                self._applied.add(applied)
            else:
                self._rows.applied(applied, self._applied)
            self._counters.samples += sum(each.marks.samples for each in self._summed)
            self._summed.clear()
            self._measurements.count_update(update.staleness)
            self._outbox.updated(update)

    def _replicate(self, replica: int) -> None:
        tensors, metadata = self._stage.state()
        metadata["applied"] = json.dumps(self._applied.numbers())
        metadata["without_rows"] = json.dumps(sorted(self._applied.without_rows))
        metadata["samples"] = json.dumps(self._counters.samples)
        with self._measurements.timed("save"):
            self._outbox.keep(replica, tensors, metadata)

    def _evaluate(self, message: Message) -> None:
        if self._rows is not None and not message.values.keys() >= {v.name for v in self._stage.graph.receives}:
            self._look_up(message)
            return
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
