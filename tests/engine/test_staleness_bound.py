"""The bound on staleness holds at every stage at any speed, and no stage waits forever."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ravnest.engine.messages import Message
from ravnest.engine.schedule import Bound, ReadyCounts, Task, next_task, updates_before
from ravnest.engine.stage import Stage, Update
from ravnest.engine.worker import StageWorker
from ravnest.graph.capture.capture import Captured, capture
from ravnest.microbatch import Marks
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import SilentOutbox, cut_after_layers, stages_of

PATIENCE_SECONDS = 30.0
STAGES = 3


@cache
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {}, batches([4, 3]))


class Pipeline:
    """Three workers whose results go to the next one at once. Each task takes a random time, so that the slowest stage
    changes."""

    def __init__(self, seed: int, limit: int, **settings: Any) -> None:
        self.boxes: list[PipelineBox] = []
        self.workers: list[StageWorker] = []
        self.done: list[int] = []
        self.failed: list[str] = []
        self.changed = threading.Condition()
        graphs, optimizer = cut_after_layers(captured(), STAGES), OptimizerSpec("SGD", {"lr": 0.01})
        for number, stage in enumerate(stages_of(captured(), graphs, optimizer, in_flight=limit, **settings)):
            box = PipelineBox(self, number, random.Random(f"{seed}-{number}"))
            self.boxes.append(box)
            self.workers.append(StageWorker(stage, box))
            box.watch(stage)
        for worker in self.workers:
            worker.start()

    def train(self, microbatches: int, ahead: int, flushes: Callable[[int], bool]) -> None:
        [batch] = batches([4])
        values = {"inputs": batch[0], "targets": batch[1]}
        for number in range(microbatches):
            room = partial(self._has_room, number - ahead)
            with self.changed:
                assert self.changed.wait_for(room, PATIENCE_SECONDS), f"nothing moves after {len(self.done)}"
            assert not self.failed
            for worker in self.workers:
                given = {value.name: values[value.name] for value in worker.stage.graph.inputs}
                if given:
                    worker.feed(Message(number, given, marks=Marks(samples=4, flush=flushes(number))))
        with self.changed:
            assert self.changed.wait_for(lambda: self.failed or len(self.done) == microbatches, PATIENCE_SECONDS)
        assert not self.failed
        assert self.done == list(range(microbatches))
        # A stage updates after it has sent its gradients on: the last update of one may come after the root is done.
        self.stop()

    def _has_room(self, done: int) -> bool:
        return bool(self.failed) or len(self.done) > done

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


class PipelineBox(SilentOutbox):
    """The outbox of one worker, which counts the staleness of every microbatch."""

    def __init__(self, pipeline: Pipeline, number: int, chance: random.Random) -> None:
        self.pipeline, self.number = pipeline, number
        self.updates: list[Update] = []
        self.staleness: list[int] = []
        """Updates between the forward and the backward of every microbatch, counted here and not by the stage."""
        self.max_in_flight = 0
        self._chance = chance
        self._slow_for = 0

    def watch(self, stage: Stage) -> None:
        """Counts what every forward and backward of the stage sees, and makes them take a random time."""
        forward, backward = stage.forward, stage.backward
        began: dict[int, int] = {}

        def watched_forward(microbatch: int, values: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
            self._wait()
            began[microbatch] = len(self.updates)
            result = forward(microbatch, values, again=again)
            self.max_in_flight = max(self.max_in_flight, stage.in_flight)
            return result

        def watched_backward(microbatch: int, gradients: Any) -> dict[str, torch.Tensor]:
            self._wait()
            self.staleness.append(len(self.updates) - began.pop(microbatch))
            return backward(microbatch, gradients)

        stage.forward, stage.backward = watched_forward, watched_backward  # type: ignore[method-assign]

    def _wait(self) -> None:
        if self._slow_for == 0 and self._chance.random() < 0.1:
            self._slow_for = self._chance.randrange(1, 12)
        if self._slow_for:
            self._slow_for -= 1
            time.sleep(self._chance.uniform(0, 2e-3))

    def forward(self, message: Message) -> None:
        self.pipeline.workers[self.number + 1].receive_forward(message)

    def backward(self, message: Message) -> None:
        self.pipeline.workers[self.number - 1].receive_backward(message)

    def updated(self, update: Update) -> None:
        self.updates.append(update)

    def done(self, message: Message) -> None:
        with self.pipeline.changed:
            self.pipeline.done.append(message.microbatch)
            self.pipeline.changed.notify_all()

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        with self.pipeline.changed:
            self.pipeline.failed.append(text)
            self.pipeline.changed.notify_all()


@pytest.fixture
def pipeline() -> Iterator[Callable[..., Pipeline]]:
    made: list[Pipeline] = []

    def make(*arguments: Any, **settings: Any) -> Pipeline:
        made.append(Pipeline(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def in_flight_within(bound: int, accumulate: int) -> int:
    return bound * accumulate + 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_stages_of_random_speed_never_exceed_the_bound(
    pipeline: Callable[..., Pipeline], bound: int, accumulate: int
) -> None:
    # The limit is far beyond the bound, as if the coordinator had sent a wrong number.
    made = pipeline(
        bound, 64, accumulate=accumulate, max_staleness=bound, max_in_flight=in_flight_within(bound, accumulate)
    )
    # Groups that are cut short make updates of fewer microbatches, and so more updates of as many in flight.
    made.train(300, 40, lambda number: number % 10 == 9)
    for box in made.boxes:
        assert max(box.staleness) <= bound, f"stage {box.number}"
        assert box.max_in_flight <= in_flight_within(bound, accumulate)
        assert max(update.staleness for update in box.updates) == max(box.staleness)
    assert max(made.boxes[0].staleness) == bound, "the bound was not even reached"
    assert [u.microbatch for u in made.boxes[0].updates] == [u.microbatch for u in made.boxes[1].updates]


def test_the_same_stages_without_a_bound_exceed_it(pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(1, 64)
    made.train(150, 40, lambda number: False)
    assert max(made.boxes[0].staleness) > 5


def test_a_root_follows_the_limit_within_its_bound(pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(2, 4, max_in_flight=6)
    root = made.workers[0]
    said = [(3, 3), (100, 6), (1, 1), (0, 1), (5, 5)]
    for told, kept in said:
        root.set_limit(told)
        assert root.limit == kept
    made.workers[1].set_limit(2)
    assert made.workers[1].limit == 6, "only a root holds back for the sake of the rate"
    made.train(60, 20, lambda number: False)
    assert made.boxes[0].max_in_flight == 5


def test_microbatches_beyond_a_lower_limit_finish_first(pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(3, 8)
    changes = deque([2, 7, 1, 8, 3])

    def change(number: int) -> bool:
        if number % 20 == 10 and changes:
            made.workers[0].set_limit(changes.popleft())
        return False

    made.train(120, 20, change)
    assert not changes


@given(
    summed=st.integers(0, 4),
    accumulate=st.integers(1, 5),
    flushes=st.lists(st.booleans(), max_size=30),
)
def test_the_predicted_number_of_updates_is_that_of_a_stage(summed: int, accumulate: int, flushes: list[bool]) -> None:
    summed %= accumulate
    found = updates_before(summed, accumulate, flushes)
    assert found >= (summed + len(flushes)) // accumulate
    if not any(flushes):
        assert found == (summed + len(flushes)) // accumulate
    assert found <= len(flushes)


@given(
    waiting=st.builds(ReadyCounts, st.just(0), st.integers(1, 9), st.just(0), st.none() | st.integers(0, 9)),
    limit=st.none() | st.integers(1, 9),
    summed=st.integers(0, 3),
    max_staleness=st.integers(0, 4),
)
def test_a_stage_with_nothing_in_flight_never_holds_a_forward_or_a_lookup_back(
    waiting: ReadyCounts, limit: int | None, summed: int, max_staleness: int
) -> None:
    bound = Bound(updates_before(summed, 4, []), max_staleness)
    assert next_task(waiting, 0, limit, bound).task is (Task.LOOKUP if waiting.lookups else Task.FORWARD)


def test_a_stage_at_its_bound_waits_and_gives_the_reason() -> None:
    held = next_task(ReadyCounts(0, 1, 0), 2, None, Bound(2, 1))
    assert (held.task, held.reason) == (Task.WAIT, "2 updates of staleness would exceed the bound of 1")
    assert next_task(ReadyCounts(0, 1, 1), 2, None, Bound(2, 1)).task is Task.EVALUATE
    assert next_task(ReadyCounts(1, 1, 1), 2, None, Bound(2, 1)).task is Task.BACKWARD
