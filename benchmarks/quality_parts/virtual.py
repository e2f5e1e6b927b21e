"""Pipeline of real stages in one process with a virtual clock, to measure the loss instead of the speed.

Every stage is a `ravnest.engine.stage.Stage` with its part of the model. The stages compute one after another, and the
engine's own rules (`next_task`) decide in virtual time when each may begin: a forward takes 1, a backward with its
update 2, and a link its given latency. So the updates between a microbatch's forward and its backward are those of
equal machines, and the same in every run.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ravnest.codecs.codec import codec_named
from ravnest.engine.schedule import ReadyCounts, Task, next_task
from ravnest.engine.stage import Stage
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.planner.pipeline_depth import enough_in_flight
from ravnest.provider.links.tensor_codec import coded, decoded

FORWARD: Final = 1.0
BACKWARD: Final = 2.0

Values = Mapping[str, Any]


def in_flight_of_plan(stages: int, link: float = 0.0) -> int:
    """The number in flight with which a plan for this many equal stages and this link latency begins; 1 for a single
    stage."""
    if stages == 1:
        return 1
    stage = FORWARD + BACKWARD
    links = [link] * 2 * (stages - 1)
    return enough_in_flight(stages * stage + sum(links), [stage] * stages, stage, links)


class _Event(NamedTuple):
    at: float
    order: int
    stage: int
    task: Task | None
    """The task that arrives at the stage; None if the stage has finished its task and is free."""
    microbatch: int
    values: Values


class VirtualPipeline:
    """Trains stages, given from root to leaf, with at most `in_flight` microbatches in flight."""

    def __init__(
        self,
        stages: Sequence[Stage],
        in_flight: int,
        link: float = 0.0,
        codec: str = "float32",
        allowed: Callable[[int], int] | None = None,
    ) -> None:
        """Values between two stages are encoded with the codec, as on a provider's links. `allowed` gives a lower limit
        for a number of updates."""
        self._stages = stages
        self._codec = codec_named(codec)
        self._most = in_flight
        self._allowed = allowed
        self._link = link
        self._forwards: list[deque[tuple[int, Values]]] = [deque() for _ in stages]
        self._backwards: list[deque[tuple[int, Values]]] = [deque() for _ in stages]
        self._busy = [False] * len(stages)
        self._did = [Task.FORWARD] * len(stages)
        self._events: list[_Event] = []
        self._orders = itertools.count()
        self._microbatches = itertools.count()
        self._fed: dict[int, Values] = {}
        self.losses: list[float] = []
        """Loss of every training microbatch, in the order of the backwards at the leaf."""
        self.staleness = [Counter[int]() for _ in stages]
        """For each stage, the number of updates by their staleness."""
        self.seconds = 0.0
        self.busy_seconds = [0.0] * len(stages)

    def train(self, batches: Iterable[Values], *, last: int | None = None) -> None:
        """Train on the batches until none is in flight. After microbatch `last` the accumulated gradients are applied
        even if they are fewer than `accumulate`."""
        waiting = iter(batches)
        self._start(waiting, last)
        while self._events:
            self.seconds = self._events[0].at
            # All events of one time are handled before any stage chooses its next task.
            while self._events and self._events[0].at <= self.seconds:
                self._happen(heapq.heappop(self._events))
            self._start(waiting, last)
        assert not self._fed, "a microbatch was lost"

    def evaluate(self, batches: Iterable[tuple[Values, int]]) -> float:
        """The mean loss over batches, each given with its number of samples."""
        total, samples = 0.0, 0
        for batch, count in batches:
            values: Values = {}
            for stage in self._stages:
                values = stage.evaluate(_given(stage, batch, values))
            total += float(values[str(self._stages[-1].graph.loss)]) * count
            samples += count
        return total / samples

    @property
    def _in_flight(self) -> int:
        return self._most if self._allowed is None else min(self._most, self._allowed(self._stages[0].version))

    def _start(self, waiting: Any, last: int | None) -> None:
        if not self._forwards[0] and self._stages[0].in_flight < self._in_flight:
            batch = next(waiting, None)
            if batch is not None:
                number = next(self._microbatches)
                self._fed[number] = batch
                self._forwards[0].append((number, {}))
        for place, stage in enumerate(self._stages):
            if self._busy[place]:
                continue
            ready = ReadyCounts(len(self._backwards[place]), len(self._forwards[place]), 0)
            task = next_task(ready, stage.in_flight, None if place else self._in_flight, after=self._did[place]).task
            if task is not Task.WAIT:
                self._did[place] = task
            if task is Task.FORWARD:
                self._forward(place, *self._forwards[place].popleft(), last)
            elif task is Task.BACKWARD:
                self._backward(place, *self._backwards[place].popleft(), last)

    def _forward(self, place: int, number: int, values: Values, last: int | None) -> None:
        stage = self._stages[place]
        results = stage.forward(number, _given(stage, self._fed[number], values))
        if place + 1 < len(self._stages):
            self._after(place, FORWARD, (place + 1, Task.FORWARD, number, results))
            return
        loss = float(results[str(stage.graph.loss)])
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of microbatch {number} is {loss}")
        self.losses.append(loss)
        self._backward(place, number, None, last, also=FORWARD)

    def _backward(
        self, place: int, number: int, gradients: Mapping[str, torch.Tensor] | None, last: int | None, also: float = 0.0
    ) -> None:
        stage = self._stages[place]
        found = stage.backward(number, gradients)
        update = stage.update(number, flush=number == last)
        if update is not None:
            self.staleness[place][update.staleness] += 1
        if place:
            self._after(place, also + BACKWARD, (place - 1, Task.BACKWARD, number, found))
        else:
            del self._fed[number]
            self._after(place, also + BACKWARD, None)

    def _after(self, place: int, seconds: float, sent: tuple[int, Task, int, Values] | None) -> None:
        """Keep the stage busy for this time; then its result is sent."""
        self._busy[place] = True
        self.busy_seconds[place] += seconds
        end = self.seconds + seconds
        heapq.heappush(self._events, _Event(end, next(self._orders), place, None, -1, {}))
        if sent is not None:
            to, task, number, values = sent
            values = self._crossed(task, number, values)
            heapq.heappush(self._events, _Event(end + self._link, next(self._orders), to, task, number, values))

    def _crossed(self, task: Task, number: int, values: Values) -> Values:
        kind = FrameKind.FORWARD if task is Task.FORWARD else FrameKind.BACKWARD
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        frame = decoded(coded(Frame(kind, number, tensors=tensors), self._codec), self._codec)
        return {**values, **frame.tensors}

    def _happen(self, event: _Event) -> None:
        if event.task is None:
            self._busy[event.stage] = False
        elif event.task is Task.FORWARD:
            self._forwards[event.stage].append((event.microbatch, event.values))
        else:
            self._backwards[event.stage].append((event.microbatch, event.values))


def _given(stage: Stage, fed: Values, received: Values) -> dict[str, Any]:
    return {**{value.name: fed[value.name] for value in stage.graph.inputs}, **received}
