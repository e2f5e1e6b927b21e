"""Inbox of a stage: the microbatches that have arrived, and which of them are ready for a task.

A microbatch arrives in one or two halves: its feed from the coordinator, and the activations from the stage before. The
inbox checks the halves against each other, joins them, and queues the microbatch for its forward or its evaluation.
Gradients are queued only for microbatches that this stage has sent on.

On failure: an invalid message (a duplicate, one far out of date, one beyond the limit, a gradient that no microbatch
waits for, or contradicting shapes) raises PeerError in the thread that passes it in, and is not queued.
"""

import threading
from collections import deque
from typing import Final

from ravnest.engine.inbox.agreement import MisfitError, Shapes, backward_misfit, feed_misfit, forward_misfit
from ravnest.engine.inbox.applied import REMEMBERED, Applied
from ravnest.engine.messages import Message
from ravnest.engine.schedule import ReadyCounts, Task
from ravnest.engine.settings import StageSettings
from ravnest.engine.telemetry.activity import Missing, missing_messages
from ravnest.errors import PeerError
from ravnest.graph.portable import PortableGraph

_SPARE_MICROBATCHES: Final = 64
"""Microbatches that may wait here in addition to four times those in flight; only a hostile peer sends more."""


class Inbox:
    """Every method may be called from any thread; none blocks for long."""

    def __init__(self, graph: PortableGraph, settings: StageSettings, applied: Applied, announced: bool) -> None:
        """`announced`: the coordinator feeds every microbatch to this stage, even if the stage has no inputs, and the
        stage computes nothing before the feed has arrived."""
        self.changed = threading.Condition()
        """Guards the inbox, and is notified when a message becomes ready."""
        self._graph = graph
        self._applied = applied
        self._needs_activations = bool(graph.from_stages)
        # A root is fed even if it has no inputs: the empty feed announces the microbatch.
        self._needs_feed = not graph.receives or announced or bool(graph.inputs)
        self._max_waiting = _SPARE_MICROBATCHES + 4 * settings.in_flight
        self._fed: dict[int, Message] = {}
        """Feeds that wait for their activations."""
        self._received: dict[int, Message] = {}
        """Activations that wait for their feed."""
        self._awaited: dict[int, Shapes] = {}
        """Microbatches whose gradients have not arrived yet, with the shapes of the activations that were sent."""
        self._accepted = {True: _RecentNumbers(), False: _RecentNumbers()}
        """Numbers of the microbatches that were queued, in training and in evaluation."""
        self._forwards: deque[Message] = deque()
        self._evaluations: deque[Message] = deque()
        self._backwards: deque[Message] = deque()
        self._lookups: deque[Message] | None = deque() if graph.lookups else None
        """Feeds of training microbatches that rows are to be looked up for."""
        self._evaluation_lookups: deque[Message] = deque()
        self._looked_up: set[int] = set()
        """Microbatches whose rows were looked up, until their activations arrive."""
        self._max_held = 0

    def feed(self, message: Message) -> None:
        """Inputs or targets of a microbatch, from the coordinator. MisfitError if the activations do not fit them."""
        if wrong := feed_misfit(self._graph, message):
            raise PeerError(wrong)
        with self.changed:
            self._join(message, self._fed, self._received if self._needs_activations else None)
            if self._lookups is not None:
                (self._lookups if message.marks.train else self._evaluation_lookups).append(message)
                self.changed.notify()

    def receive_forward(self, message: Message) -> None:
        """Activations of a microbatch, from the stage before. MisfitError if they do not fit its feed."""
        number = message.microbatch
        with self.changed:
            if self._lookups is not None and number not in self._looked_up:
                raise PeerError(f"activations of microbatch {number} arrived before its rows were sent to the root")
            self._join(message, self._received, self._fed if self._needs_feed else None)
            self._looked_up.discard(number)

    def receive_backward(self, message: Message) -> None:
        """Gradients of a microbatch, from the stage after."""
        number = message.microbatch
        with self.changed:
            if number not in self._awaited:
                raise PeerError(f"gradients of microbatch {number} arrived, but this stage does not wait for any")
            if wrong := backward_misfit(self._awaited[number], message):
                raise PeerError(wrong)
            del self._awaited[number]
            self._backwards.append(message)
            self.changed.notify()

    def await_gradients(self, microbatch: int, sent: Shapes) -> None:
        """Accepts gradients of this microbatch from now on; to be called before its activations are sent."""
        with self.changed:
            self._awaited[microbatch] = sent

    def ready(self) -> ReadyCounts:
        evaluations = len(self._evaluations) + len(self._evaluation_lookups)
        lookups = None if self._lookups is None else len(self._lookups)
        return ReadyCounts(len(self._backwards), len(self._forwards), evaluations, lookups)

    def take(self, task: Task) -> Message:
        """Removes and returns the oldest message that is ready for this task; there must be one."""
        evaluations = self._evaluation_lookups or self._evaluations
        queue = {Task.BACKWARD: self._backwards, Task.FORWARD: self._forwards, Task.EVALUATE: evaluations}
        if self._lookups is not None:
            queue[Task.LOOKUP] = self._lookups
        message = queue[task].popleft()
        if task is Task.LOOKUP or queue[task] is self._evaluation_lookups:
            self._looked_up.add(message.microbatch)
        return message

    @property
    def waits_for_rows(self) -> bool:
        """Whether a root has a microbatch whose rows have not arrived: the leaf holds them back, or has sent them."""
        return bool(self._graph.rows and self._fed)

    def missing(self) -> tuple[Missing, ...]:
        """The messages that would make a task ready."""
        with self.changed:
            return missing_messages(
                fed=self._fed,
                received=self._received,
                awaited=self._awaited,
                needs_feed=self._needs_feed,
                needs_forward=self._needs_activations,
            )

    def take_max_held(self) -> int:
        """The largest number of training microbatches that were held here at once since the last call."""
        with self.changed:
            now = self._held()
            largest, self._max_held = max(now, self._max_held), now
        return largest

    def _held(self) -> int:
        return len(self._forwards) + len(self._awaited) + len(self._backwards)

    def _join(self, message: Message, own: dict[int, Message], others: dict[int, Message] | None) -> None:
        """Accepts one half of a microbatch, or the whole microbatch if there is no other half (`others` is None)."""
        number, train = message.microbatch, message.marks.train
        with self.changed:
            # Training microbatches are numbered 0, 1, … and evaluations -1, -2, …; none is queued twice.
            known = not train or self._applied.is_known(number)
            if number in own or not known or not self._accepted[train].may_add(abs(number)):
                raise PeerError(f"microbatch {number} came again, or long after one that was fed later")
            waiting = len(self._fed) + len(self._received) + len(self._forwards) + len(self._evaluations)
            # Microbatches sent on without an answer count too: otherwise a stem would forward a flood and be blamed for
            # it.
            waiting += len(self._awaited)
            if waiting >= self._max_waiting:
                raise PeerError(f"{waiting} microbatches wait here already, more than can be in flight")
            if others is not None:
                other = others.pop(number, None)
                if other is None:
                    own[number] = message
                    return
                fed, received = (message, other) if own is self._fed else (other, message)
                if wrong := forward_misfit(self._graph, fed, received):
                    raise MisfitError(wrong)
                message = fed.with_values({**fed.values, **received.values})
            self._accepted[train].add(abs(number))
            (self._forwards if train else self._evaluations).append(message)
            self._max_held = max(self._max_held, self._held())
            self.changed.notify()


class _RecentNumbers:
    """The newest numbers of a sequence that arrives nearly in order.

    A microbatch that is REMEMBERED behind the newest one is refused. Microbatches that a lost cluster did not finish
    are fed to this one out of order, slightly behind the newest.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._numbers: set[int] = set()

    def may_add(self, number: int) -> bool:
        """Whether the number is new, and not too old to tell."""
        return number not in self._numbers and number > self._newest - REMEMBERED

    def add(self, number: int) -> None:
        self._numbers.add(number)
        self._newest = max(self._newest, number)
        if len(self._numbers) > 2 * REMEMBERED:
            self._numbers = {each for each in self._numbers if each > self._newest - REMEMBERED}
