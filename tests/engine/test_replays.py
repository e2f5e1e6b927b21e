"""After a break, microbatches in flight are replayed, and every stage applies every microbatch once."""

import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ravnest.engine.inbox.applied import REMEMBERED, Applied
from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.stage import Stage, Update
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.microbatch import Marks
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import CLASSES, FEATURES, batches
from tests.engine.stages import SilentOutbox, stages_of

SECONDS = 30.0
STAGES = 3
BATCHES = batches([8] * 12)


@cache
def captured() -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
    )
    return capture(model, F.cross_entropy, {}, batches([8, 5]))


@cache
def graphs(stages: int) -> tuple[PortableGraph, ...]:
    """The graphs of the stages, each with a batch norm."""
    graph, places = captured().graph, list[int]()
    for place in layout(graph).cuts:
        if len(places) < stages - 1 and all(map(_counts, split(graph, [*places, place]))):
            places.append(place)
    assert len(places) == stages - 1
    return tuple(split(graph, places))


def _counts(graph: PortableGraph) -> bool:
    return any(state.key.endswith("num_batches_tracked") for state in graph.states)


def stages(count: int = STAGES, lr: float = 0.05, **more: Any) -> list[Stage]:
    return stages_of(captured(), graphs(count), OptimizerSpec("SGD", {"lr": lr, "momentum": 0.9}), **more)


class Pipe(SilentOutbox):
    """The outbox of all workers that a stage has had."""

    def __init__(self, owner: "Pipeline", number: int) -> None:
        self.owner, self.number = owner, number
        self.updates: list[int] = []
        self.losses: list[int] = []
        self.rounds: list[int] = []
        self.saved: list[int] = []
        self.kept: dict[int, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}

    def forward(self, message: Message) -> None:
        self.owner.pass_on(self.number + 1, "receive_forward", message)

    def backward(self, message: Message) -> None:
        self.owner.pass_on(self.number - 1, "receive_backward", message)

    def trained(self, loss: LossRecord) -> None:
        self.losses.append(loss.microbatch)

    def updated(self, update: Update) -> None:
        self.updates.append(update.microbatch)

    def done(self, message: Message) -> None:
        self.owner.finished(message.microbatch)

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        self.owner.failures.append(text)

    def snapshot(self, snapshot: Snapshot) -> None:
        self.rounds.append(snapshot.round)

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self.saved.append(checkpoint)

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        # Saved again if the microbatch was only summed, and not applied, when the pipeline broke.
        assert replica not in self.kept or replica - 1 not in json.loads(self.kept[replica][1]["applied"])
        self.kept[replica] = {name: tensor.clone() for name, tensor in tensors.items()}, dict(metadata)


class Pipeline:
    """Stages that get new workers after each break."""

    def __init__(self, parts: Sequence[Stage], applied: Sequence[Applied] | None = None) -> None:
        self.stages = parts
        self.pipes = [Pipe(self, number) for number in range(len(parts))]
        self.failures: list[str] = []
        self.done: list[int] = []
        self._breaks_after: int | None = None
        self._changed = threading.Condition()
        self.workers = [
            StageWorker(stage, pipe, applied=None if applied is None else applied[number])
            for number, (stage, pipe) in enumerate(zip(parts, self.pipes, strict=True))
        ]
        for worker in self.workers:
            worker.start()

    def train(self, messages: Sequence[Message], breaks_after: int | None = None) -> None:
        """Feeds these messages; with `breaks_after`, nothing is passed on after this many microbatches are done."""
        self.done.clear()
        self._breaks_after = breaks_after
        for message in messages:
            for worker, stage in zip(self.workers, self.stages, strict=True):
                names = {value.name for value in stage.graph.inputs}
                if names:
                    worker.feed(replace(message, values={n: v for n, v in message.values.items() if n in names}))
        enough = len(messages) if breaks_after is None else breaks_after
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= enough or self.failures, SECONDS), self.done
        assert not self.failures

    def renew(self) -> None:
        """Every stage discards its microbatches in flight and gets a new worker."""
        self.stop()
        workers = []
        for worker, stage, pipe in zip(self.workers, self.stages, self.pipes, strict=True):
            assert not worker.runs and not worker.broken
            stage.forget()
            workers.append(StageWorker(stage, pipe, applied=worker.applied, counters=worker.counters))
        self.workers = workers
        for worker in workers:
            worker.start()

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def pass_on(self, number: int, how: str, message: Message) -> None:
        if self._breaks_after is None or len(self.done) < self._breaks_after:
            getattr(self.workers[number], how)(message)

    def finished(self, microbatch: int) -> None:
        with self._changed:
            self.done.append(microbatch)
            self._changed.notify_all()

    def counted(self) -> set[int]:
        """The numbers of microbatches that the batch norms have counted."""
        states = [stage.state_tensors() for stage in self.stages]
        return {int(t) for state in states for name, t in state.items() if name.endswith("num_batches_tracked")}


def message(number: int, **more: Any) -> Message:
    inputs, targets = BATCHES[number]
    return Message(number, {"inputs": inputs, "targets": targets}, marks=Marks(samples=len(targets), **more))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [{}, {"versions": "recompute"}, {"versions": "latest"}, {"split_backward": True}, {"accumulate": 2}],
    ids=lambda options: "-".join(map(str, options.values())) or "stash",
)
def test_every_stage_applies_every_microbatch_once_after_a_break(options: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    pipeline = Pipeline(stages(in_flight=3, **options))
    messages = [message(n, round=n if n == 5 else 0, replica=n + 1 if n in (3, 8) else 0) for n in range(len(BATCHES))]
    messages[-1] = replace(messages[-1], marks=replace(messages[-1].marks, flush=True))
    updates = len(BATCHES) // options.get("accumulate", 1)
    try:
        for _ in range(3):
            first = min(next((n for n in range(len(BATCHES)) if n not in w.applied), 12) for w in pipeline.workers)
            pipeline.train(messages[first:], breaks_after=chance.randrange(0, 4))
            pipeline.renew()
            assert not any(stage.in_flight for stage in pipeline.stages)
        first = min(next((n for n in range(len(BATCHES)) if n not in w.applied), 12) for w in pipeline.workers)
        pipeline.train(messages[first:])
        assert pipeline.done == list(range(first, len(BATCHES)))
    finally:
        pipeline.stop()
    for worker, stage, pipe in zip(pipeline.workers, pipeline.stages, pipeline.pipes, strict=True):
        assert worker.applied.numbers() == list(range(len(BATCHES)))
        assert stage.version == worker.counters.updates == len(pipe.updates) == updates
        assert pipe.updates == sorted(set(pipe.updates))
        assert worker.counters.samples == sum(len(targets) for _, targets in BATCHES)
        assert pipe.rounds.count(5) == 1 if "accumulate" not in options else 5 in pipe.rounds
        assert set(pipe.kept) <= {4, 9}
    assert pipeline.counted() == {len(BATCHES)}
    if "accumulate" not in options:
        # On a leaf nothing is between the loss of a microbatch and its update.
        assert pipeline.pipes[-1].losses == list(range(len(BATCHES)))


def test_a_replay_after_equal_discards_is_bitwise_the_undisturbed_run() -> None:
    plain, broken = Pipeline(stages(in_flight=1)), Pipeline(stages(in_flight=1))
    try:
        plain.train([message(n) for n in range(8)])
        broken.train([message(n) for n in range(5)])
        broken.renew()
        # The first three come again everywhere: with one in flight the rest is what it would have been.
        broken.train([message(n) for n in range(2, 8)])
        assert broken.done == list(range(2, 8))
    finally:
        plain.stop()
        broken.stop()
    for one, other in zip(plain.stages, broken.stages, strict=True):
        for name, tensor in one.state_tensors().items():
            assert torch.equal(tensor, other.state_tensors()[name]), name


@settings(max_examples=25)
@given(
    st.sets(st.integers(0, len(BATCHES) - 1)),
    st.sets(st.integers(0, len(BATCHES) - 1)),
    st.integers(1, 3),
)
def test_a_stage_applies_only_microbatches_that_it_has_not_applied(
    applied: set[int], flushes: set[int], accumulate: int
) -> None:
    pipeline = Pipeline(stages(1, accumulate=accumulate), [Applied(applied)])
    [other] = stages(1, accumulate=accumulate)
    try:
        pipeline.train([message(n, flush=n in flushes) for n in range(len(BATCHES))])
    finally:
        pipeline.stop()
    summed, expected = list[int](), set(applied)
    for number in range(len(BATCHES)):
        if number not in applied:
            other.forward(number, message(number).values)
            other.backward(number, None)
            summed.append(number)
        if summed and (number in flushes or (number not in applied and len(summed) == accumulate)):
            assert other.update(number, flush=True) is not None
            expected |= set(summed)
            summed.clear()
    [stage], [worker], [pipe] = pipeline.stages, pipeline.workers, pipeline.pipes
    assert pipeline.done == list(range(len(BATCHES)))
    assert worker.applied.numbers() == sorted(expected)
    assert pipe.losses == [n for n in range(len(BATCHES)) if n not in applied]
    assert stage.version == other.version
    for name, tensor in other.state_tensors().items():
        assert torch.equal(tensor, stage.state_tensors()[name]), name


def test_a_replica_contains_only_applied_microbatches() -> None:
    pipeline = Pipeline(stages(in_flight=3))
    try:
        pipeline.train([message(n, replica=5 if n == 4 else 0) for n in range(8)])
    finally:
        pipeline.stop()
    for pipe in pipeline.pipes:
        tensors, metadata = pipe.kept[5]
        assert json.loads(metadata["applied"]) == list(range(5)) and json.loads(metadata["version"]) == 5
        counters = {int(t) for name, t in tensors.items() if name.endswith("num_batches_tracked")}
        assert counters == {5}
        assert {name.partition(":")[0] for name in tensors} == {"param", "buffer", "optim"}


def test_a_replica_lists_summed_microbatches_as_not_applied() -> None:
    pipeline = Pipeline(stages(1, accumulate=2))
    try:
        pipeline.train([message(n, replica=3 if n == 2 else 0) for n in range(4)])
    finally:
        pipeline.stop()
    tensors, metadata = pipeline.pipes[0].kept[3]
    assert json.loads(metadata["applied"]) == [0, 1] and json.loads(metadata["version"]) == 1
    assert {int(t) for name, t in tensors.items() if name.endswith("num_batches_tracked")} == {2}


def test_a_replayed_microbatch_causes_no_checkpoint_replica_or_round() -> None:
    pipeline = Pipeline(stages(1), [Applied([0, 1])])
    try:
        pipeline.train([message(n, replica=n + 1, round=n + 1, checkpoint=n + 1) for n in range(3)])
    finally:
        pipeline.stop()
    [pipe] = pipeline.pipes
    assert (list(pipe.kept), pipe.rounds, pipe.saved) == ([3], [3], [3])


def test_a_microbatch_that_is_too_old_to_tell_whether_it_was_applied_is_refused() -> None:
    [stage] = stages(1)
    worker = StageWorker(stage, Pipe(Pipeline([]), 0), applied=Applied(range(1, REMEMBERED + 1000)))
    with pytest.raises(PeerError, match="microbatch 3 came again, or long after"):
        worker.feed(message(3))


def test_pending_calls_remain_for_the_next_worker() -> None:
    pipeline = Pipeline(stages(1))
    pipeline.stop()
    did: list[int] = []
    pipeline.workers[0].call_between_tasks(lambda: did.append(1))
    left = pipeline.workers[0].take_pending_calls()
    pipeline.renew()
    for work in left:
        pipeline.workers[0].call_between_tasks(work)
    try:
        pipeline.train([message(0)])
    finally:
        pipeline.stop()
    assert did == [1]
