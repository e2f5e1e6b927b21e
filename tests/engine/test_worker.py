"""Workers of a pipeline in one process without a network: tests pass the results of one worker to the next."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from queue import Empty, Queue
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.inbox.applied import REMEMBERED
from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.speed.pretended_pace import Pretence
from ravnest.engine.stage import Update
from ravnest.engine.telemetry.activity import ANY, Missing
from ravnest.engine.telemetry.spans import WAIT_LIMIT, WAIT_NOTHING, Span
from ravnest.engine.worker import StageWorker
from ravnest.errors import PeerError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.microbatch import Marks
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, accuracy, batches
from tests.engine.stages import SilentOutbox, cut_after_layers, stages_of

PATIENCE_SECONDS = 20.0


@cache
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {"accuracy": accuracy}, batches([8, 5]))


class Box(SilentOutbox):
    """An Outbox that keeps all results in order."""

    def __init__(self) -> None:
        self.things: Queue[tuple[str, Any]] = Queue()
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        self.kept: dict[int, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}
        self.updates: list[Update] = []
        self.losses: list[LossRecord] = []
        self.spans: list[Span] = []
        self.keeps_work = False
        """Whether spans of work are kept among the things too, as kind and microbatch."""

    def forward(self, message: Message) -> None:
        self.things.put(("forward", message))

    def backward(self, message: Message) -> None:
        self.things.put(("backward", message))

    def trained(self, loss: LossRecord) -> None:
        self.losses.append(loss)

    def updated(self, update: Update) -> None:
        self.updates.append(update)

    def done(self, message: Message) -> None:
        self.things.put(("done", message))

    def worked(self, span: Span) -> None:
        self.spans.append(span)
        if self.keeps_work and span.kind != "wait":
            self.things.put((span.kind, span.microbatch))

    def evaluated(self, message: Message) -> None:
        self.things.put(("evaluated", message))

    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self.saved[checkpoint] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.things.put(("saved", checkpoint))

    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self.kept[replica] = ({name: tensor.clone() for name, tensor in tensors.items()}, dict(metadata))

    def snapshot(self, snapshot: Snapshot) -> None:
        self.things.put(("snapshot", (snapshot, {name: tensor.clone() for name, tensor in snapshot.tensors.items()})))

    def failed(self, kind: str, text: str, microbatch: int | None) -> None:
        self.things.put(("failed", (kind, text, microbatch)))

    def next(self, kind: str) -> Any:
        """The next thing, which must be of this kind."""
        found, thing = self.things.get(timeout=PATIENCE_SECONDS)
        assert found == kind, (found, thing)
        return thing

    def nothing(self) -> bool:
        try:
            self.things.get(timeout=0.05)
        except Empty:
            return True
        return False


Pair = tuple[StageWorker, Box]
Make = Callable[..., list[Pair]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Workers of as many stages as asked for, root first; all are ended afterwards."""
    started: list[StageWorker] = []

    def made(stages: int, *, lr: float = 0.1, slower: float = 1.0, **settings: Any) -> list[Pair]:
        pairs = []
        graphs = cut_after_layers(captured(), stages)
        for stage in stages_of(captured(), graphs, OptimizerSpec("SGD", {"lr": lr}), **settings):
            box = Box()
            pairs.append((StageWorker(stage, box, Pretence(slower)), box))
            started.append(pairs[-1][0])
        for worker, _ in pairs:
            worker.start()
        return pairs

    yield made
    for worker in started:
        worker.stop()


def message(number: int, batch: Any, names: tuple[str, ...] = ("inputs", "targets"), **more: Any) -> Message:
    values = dict(zip(("inputs", "targets"), batch, strict=True))
    return Message(number, {name: values[name] for name in names}, marks=Marks(samples=len(batch[1]), **more))


def inputs_of(worker: StageWorker) -> tuple[str, ...]:
    return tuple(value.name for value in worker.stage.graph.inputs)


def feed(pairs: list[Pair], number: int, batch: Any, **more: Any) -> None:
    for worker, _ in pairs:
        if names := inputs_of(worker):
            worker.feed(message(number, batch, names, **more))


def test_one_stage_trains_as_a_plain_loop(make: Make) -> None:
    [(worker, box)] = make(1)
    model = a_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (features, labels) in enumerate(batches([8, 8, 3])):
        worker.feed(message(number, (features, labels)))
        assert box.next("done").microbatch == number
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        assert box.losses[-1].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    worker.save(9)
    assert box.next("saved") == 9
    for name, value in model.state_dict().items():
        assert torch.allclose(box.saved[9][f"param:{name}"], value, atol=1e-6), name


def test_two_stages_pass_a_microbatch_forward_and_back(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2)
    batch = batches([8])[0]
    feed([(root, root_box), (leaf, leaf_box)], 0, batch, checkpoint=1)
    leaf.receive_forward(root_box.next("forward"))
    gradient = leaf_box.next("backward")
    root.receive_backward(gradient)
    # Each saves right after applying the microbatch the checkpoint was announced with.
    assert leaf_box.next("saved") == root_box.next("saved") == 1
    assert root_box.next("done").microbatch == 0
    assert root_box.updates == [Update(0, 0, 1)] and leaf_box.updates == [Update(0, 0, 1)]
    assert root.counters.updates == leaf.counters.updates == 1


def test_a_split_backward_sends_gradients_on_before_those_of_the_weights_are_computed(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2, split_backward=True)
    leaf_box.keeps_work = True
    batch = batches([8])[0]
    feed([(root, root_box), (leaf, leaf_box)], 0, batch)
    leaf.receive_forward(root_box.next("forward"))
    assert [leaf_box.next("forward"), leaf_box.next("backward")] == [0, 0]
    root.receive_backward(leaf_box.next("backward"))
    assert [leaf_box.next("weights"), leaf_box.next("update")] == [0, 0]
    assert root_box.next("done").microbatch == 0
    assert leaf.counters.seconds["weights"] > 0 and "weights" not in root.counters.seconds


def test_targets_may_come_before_or_after_the_activations(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2)
    for number, first in enumerate(("targets", "activations")):
        batch = batches([8])[0]
        root.feed(message(number, batch, inputs_of(root)))
        activations = root_box.next("forward")
        targets = message(number, batch, inputs_of(leaf))
        if first == "targets":
            leaf.feed(targets)
            assert leaf_box.nothing()
            leaf.receive_forward(activations)
        else:
            leaf.receive_forward(activations)
            assert leaf_box.nothing()
            leaf.feed(targets)
        root.receive_backward(leaf_box.next("backward"))
        assert root_box.next("done").microbatch == number


def test_spans_of_work_and_waits_do_not_overlap(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2, in_flight=1)
    data = batches([8, 8])
    for number, batch in enumerate(data):
        feed([(root, root_box), (leaf, leaf_box)], number, batch)
    for number in range(2):
        leaf.receive_forward(root_box.next("forward"))
        root.receive_backward(leaf_box.next("backward"))
        assert root_box.next("done").microbatch == number
    # Both are asked, as the leaf's last update may come after the root's.
    for worker, box in ((root, root_box), (leaf, leaf_box)):
        worker.save(5)
        assert box.next("saved") == 5
    for box in (root_box, leaf_box):
        assert all(before.ended <= behind.began for before, behind in itertools.pairwise(box.spans))
        for number in range(2):
            own = [span.kind for span in box.spans if span.microbatch == number and span.kind != "wait"]
            assert own[:3] == ["forward", "backward", "update"]
    waits = [(span.detail, span.microbatch) for span in root_box.spans if span.kind == "wait"]
    # The second microbatch is there, and has to wait for the gradient of the first.
    assert (WAIT_LIMIT, 0) in waits and waits[0] == (WAIT_NOTHING, 0)
    assert all(why == WAIT_NOTHING for why, _ in [(s.detail, s) for s in leaf_box.spans if s.kind == "wait"])


def test_the_activity_names_the_current_work_or_the_missing_messages(make: Make) -> None:
    def misses(worker: StageWorker, *missing: Missing) -> bool:
        # A worker that has put something out is about to wait, and no more.
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
        while time.monotonic() < deadline:
            activity = worker.activity()
            if (activity.kind, activity.missing) == ("wait", missing):
                return activity.seconds < PATIENCE_SECONDS
            pause.wait(0.01)
        return False

    (root, root_box), (leaf, leaf_box) = make(2)
    batch = batches([8])[0]
    assert misses(root, Missing("feed", ANY, 0)) and misses(leaf, Missing("forward", ANY, 0))
    feed([(root, root_box)], 0, batch)
    feed([(leaf, leaf_box)], 0, batch, checkpoint=7)
    activations = root_box.next("forward")
    assert misses(root, Missing("gradient", 0, 1)) and misses(leaf, Missing("forward", 0, 1))

    saved, go_on = leaf_box.save, threading.Event()

    def save(checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        go_on.wait(PATIENCE_SECONDS)
        saved(checkpoint, tensors, metadata)

    leaf_box.save = save  # type: ignore[method-assign]
    leaf.receive_forward(replace(activations, marks=replace(activations.marks, checkpoint=7)))
    gradient = leaf_box.next("backward")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while leaf.activity().kind != "save":
        assert time.monotonic() < deadline
    assert leaf.activity().microbatch == 0 and leaf.activity().missing == ()
    go_on.set()
    assert leaf_box.next("saved") == 7 and misses(leaf, Missing("forward", ANY, 0))
    root.receive_backward(gradient)
    assert root_box.next("done").microbatch == 0 and misses(root, Missing("feed", ANY, 0))


def test_a_stage_that_never_waits_is_busy_all_the_time(make: Make) -> None:
    [(worker, box)] = make(1, in_flight=1)
    data = batches([8] * 12)
    for number, batch in enumerate(data):
        worker.feed(message(number, batch))
    for number in range(12):
        assert box.next("done").microbatch == number
    worker.stop()
    training, counters = worker.counters.training, worker.counters
    assert training.busy_seconds == pytest.approx(training.seconds)
    assert 0 < training.busy_seconds < counters.busy_seconds


def test_a_root_holds_forwards_back_at_its_limit_and_takes_backwards_first(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2, in_flight=2)
    data = batches([8] * 4)
    for number, batch in enumerate(data):
        root.feed(message(number, batch, inputs_of(root)))
    sent = [root_box.next("forward"), root_box.next("forward")]
    assert root_box.nothing(), "two are in flight"
    for forward, batch in zip(sent, data, strict=False):
        leaf.receive_forward(forward)
        leaf.feed(message(forward.microbatch, batch, inputs_of(leaf)))
        root.receive_backward(leaf_box.next("backward"))
        assert root_box.next("done").microbatch == forward.microbatch
        assert root_box.next("forward").microbatch == forward.microbatch + 2
    # The second was computed before the first was applied: one update lies between.
    assert [update.staleness for update in root_box.updates] == [0, 1]
    assert root.counters.staleness == {0: 1, 1: 1}
    assert root.flight_seconds > 0 and leaf.flight_seconds == 0, "a leaf has none between forward and backward"


def test_gradients_are_averaged_over_the_microbatches_of_an_update(make: Make) -> None:
    [(worker, box)] = make(1, accumulate=2)
    data = batches([8] * 3)
    for number, batch in enumerate(data):
        worker.feed(message(number, batch, flush=number == 2))
        box.next("done")
    assert [(update.microbatch, update.version) for update in box.updates] == [(1, 1), (2, 2)]
    model = a_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in (data[:2], data[2:]):
        optimizer.zero_grad()
        for features, labels in group:
            (F.cross_entropy(model(features), labels) / len(group)).backward()
        optimizer.step()
    worker.save(1)
    box.next("saved")
    for name, value in model.state_dict().items():
        assert torch.allclose(box.saved[1][f"param:{name}"], value, atol=1e-6), name


def test_an_evaluation_returns_loss_and_metrics_and_changes_nothing(make: Make) -> None:
    [(worker, box)] = make(1)
    features, labels = batches([5])[0]
    worker.feed(message(-1, (features, labels), train=False))
    result = box.next("evaluated")
    with torch.no_grad():
        logits = a_net()(features)
    assert result.microbatch == -1
    assert result.values == pytest.approx(
        {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(accuracy(logits, labels))}, rel=1e-5
    )
    assert worker.counters.updates == 0 and box.updates == []


def test_a_loss_that_is_not_finite_stops_the_worker_and_applies_nothing(make: Make) -> None:
    [(worker, box)] = make(1)
    worker.feed(message(4, (torch.full((8, 6), float("inf")), torch.zeros(8, dtype=torch.long))))
    kind, text, microbatch = box.next("failed")
    assert (kind, microbatch) == ("not_finite", 4)
    assert text.startswith("the loss of microbatch 4 is nan; lower the learning rate")
    assert box.updates == []
    worker.feed(message(5, batches([8])[0]))
    assert box.nothing(), "it takes no more work"


def test_a_stage_that_is_never_idle_saves_before_its_next_task(make: Make) -> None:
    [(worker, box)] = make(1)
    held = threading.Event()
    worker.call_between_tasks(lambda: held.wait(PATIENCE_SECONDS) and None)
    for number, batch in enumerate(batches([8] * 4)):
        worker.feed(message(number, batch))
    worker.save(7)
    held.set()
    assert box.next("saved") == 7
    for number in range(4):
        assert box.next("done").microbatch == number


def test_parameters_that_are_not_finite_are_not_saved(make: Make) -> None:
    [(worker, box)] = make(1, lr=3e38)
    features, labels = batches([8])[0]
    # The loss is finite; the step that follows from it is not.
    worker.feed(message(0, (features * 1e4, labels), checkpoint=3))
    kind, text, _ = box.next("failed")
    assert kind == "not_finite"
    assert "is not finite after microbatch 0, so it is not saved; lower the learning rate" in text
    assert box.saved == {}


def test_an_error_in_torch_is_reported_with_its_microbatch(make: Make) -> None:
    [(worker, box)] = make(1)
    worker.feed(message(2, (torch.zeros(8, 6), torch.full((8,), 99))))
    kind, text, microbatch = box.next("failed")
    assert (kind, microbatch) == ("error", 2)
    assert "Target 99 is out of bounds" in text


def test_a_worker_that_waits_can_be_stopped(make: Make) -> None:
    [(worker, box)] = make(1)
    worker.feed(message(0, batches([8])[0]))
    box.next("done")
    worker.stop(timeout_seconds=5)
    assert not worker.runs
    assert 0 < worker.counters.busy_seconds < 60


def test_a_gradient_that_is_not_finite_is_not_applied(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2)
    feed([(root, root_box), (leaf, leaf_box)], 0, batches([8])[0])
    leaf.receive_forward(root_box.next("forward"))
    gradient = leaf_box.next("backward")
    before = {name: tensor.clone() for name, tensor in root.stage.state()[0].items()}
    root.receive_backward(replace(gradient, values={k: v * float("nan") for k, v in gradient.values.items()}))
    kind, text, number = root_box.next("failed")
    assert (kind, number) == ("not_finite", 0)
    assert "that the next stage sent for microbatch 0 is not finite, so it is not applied" in text
    after = root.stage.state()[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_gradients_that_are_not_awaited_are_refused(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2)
    feed([(root, root_box), (leaf, leaf_box)], 0, batches([8])[0])
    leaf.receive_forward(root_box.next("forward"))
    gradient = leaf_box.next("backward")
    with pytest.raises(PeerError, match="gradients of microbatch 7 arrived, but this stage does not wait for any"):
        root.receive_backward(replace(gradient, microbatch=7))
    root.receive_backward(gradient)
    with pytest.raises(PeerError, match="gradients of microbatch 0 arrived"):
        root.receive_backward(gradient)
    assert root_box.next("done").microbatch == 0


def test_a_microbatch_is_accepted_once(make: Make) -> None:
    [(worker, box)] = make(1)
    batch = batches([8])[0]
    far = REMEMBERED + 1000
    for number in (3, far, far + 1):
        worker.feed(message(number, batch))
        assert box.next("done").microbatch == number
    for number in (3, far, 0):
        with pytest.raises(PeerError, match=f"microbatch {number} came again, or long after one that was fed later"):
            worker.feed(message(number, batch))
    worker.feed(message(far + 2, batch))
    assert box.next("done").microbatch == far + 2


def test_an_older_microbatch_of_another_cluster_is_accepted(make: Make) -> None:
    [(worker, box)] = make(1)
    batch = batches([8])[0]
    for number in (7, 4, 8, 5):
        worker.feed(message(number, batch))
        assert box.next("done").microbatch == number


def test_a_round_snapshot_precedes_the_update_of_its_microbatch(make: Make) -> None:
    [(worker, box)] = make(1)
    batch = batches([8])[0]
    worker.feed(message(0, batch))
    box.next("done")
    worker.feed(message(1, batch, round=3, fragment=2))
    taken, values = box.next("snapshot")
    box.next("done")
    assert (taken.round, taken.fragment, taken.version, taken.samples) == (3, 2, 1, 8)
    worker.save(1)
    box.next("saved")
    name = next(name for name in values if name.startswith("param:"))
    assert not torch.equal(values[name], box.saved[1][name]), "the microbatch has been applied since"


def test_a_round_without_a_microbatch_takes_the_current_state(make: Make) -> None:
    [(worker, box)] = make(1)
    stage = worker.stage
    worker.feed(message(0, batches([8])[0]))
    box.next("done")
    worker.snapshot(1, 0)
    taken, values = box.next("snapshot")
    assert (taken.version, taken.samples) == (1, 8)
    name = next(name for name in values if name.startswith("param:"))
    worker.call_between_tasks(lambda: stage.shift({name: torch.ones_like(values[name])}))
    worker.save(7, {name: torch.zeros_like(values[name]), "outer:more": torch.ones(2)})
    box.next("saved")
    worker.save(8)
    box.next("saved")
    assert not box.saved[7][name].any(), "the given tensor replaces the stage's own"
    assert torch.equal(box.saved[7]["outer:more"], torch.ones(2)), "an additional tensor is saved too"
    assert torch.equal(box.saved[8][name], values[name] + 1) and "outer:more" not in box.saved[8]


def test_duplicate_or_contradicting_halves_are_refused(make: Make) -> None:
    (root, root_box), (leaf, _) = make(2)
    root.feed(message(0, batches([8])[0], inputs_of(root)))
    activations = root_box.next("forward")
    leaf.receive_forward(activations)
    with pytest.raises(PeerError, match="microbatch 0 came again"):
        leaf.receive_forward(activations)
    with pytest.raises(PeerError, match="have train True, but its feed has False"):
        leaf.feed(message(0, batches([8])[0], inputs_of(leaf), train=False))


def test_the_number_of_waiting_halves_is_bounded(make: Make) -> None:
    (root, root_box), (leaf, _) = make(2)
    root.feed(message(0, batches([8])[0], inputs_of(root)))
    activations = root_box.next("forward")
    with pytest.raises(PeerError, match="microbatches wait here already, more than can be in flight"):
        for number in range(100):
            leaf.receive_forward(replace(activations, microbatch=number))


def test_a_simulated_slower_stage_sends_as_late_as_a_slower_machine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = make(2, slower=3.0)
    (root, first), (leaf, last) = pairs
    waits: dict[str, list[float]] = {"root": [], "leaf": []}
    sent: dict[str, int] = {}

    def watch(name: str, pair: Pair, *kinds: str) -> None:
        """Notes for how many waits what it sends has waited."""
        worker, box = pair
        monkeypatch.setattr(worker.pace, "wait_until", waits[name].append)
        for kind in kinds:
            put = getattr(box, kind)

            def noted(message: Message, kind: str = kind, put: Callable[[Message], None] = put) -> None:
                sent[kind] = len(waits[name])
                put(message)

            monkeypatch.setattr(box, kind, noted)

    watch("root", pairs[0], "forward", "done")
    watch("leaf", pairs[1], "backward")
    feed(pairs, 0, batches([8])[0])
    leaf.receive_forward(first.next("forward"))
    root.receive_backward(last.next("backward"))
    first.next("done")
    # After the forward; after forward and backward, and before the update; after all three.
    assert sent == {"forward": 1, "backward": 2, "done": 3}


def test_a_slower_stage_is_busy_while_it_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    [(worker, box)] = make(1, slower=20.0)

    def update(*_: object, **__: object) -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(worker.stage, "update", update)
    worker.feed(message(0, batches([8])[0]))
    box.next("done")
    worker.stop(PATIENCE_SECONDS)
    assert worker.counters.busy_seconds >= 0.2


def test_a_simulated_wait_is_interrupted_by_stop(make: Make) -> None:
    [(worker, _)] = make(1, slower=1e9)
    worker.feed(message(0, batches([8])[0]))
    worker.stop(PATIENCE_SECONDS)
    assert not worker.runs


def test_lack_of_memory_is_reported_as_such(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    [(worker, box)] = make(1)

    def exhausted(*_: object, **__: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    monkeypatch.setattr(worker.stage, "forward", exhausted)
    worker.feed(message(0, batches([8])[0]))
    kind, text, microbatch = box.next("failed")
    assert (kind, microbatch) == ("memory", 0)
    assert text.startswith("memory ran out: another 1.5 GiB were needed (OutOfMemoryError: CUDA")


def test_the_maximum_of_held_microbatches_is_counted_since_the_last_call(make: Make) -> None:
    (root, root_box), (leaf, leaf_box) = make(2, in_flight=3)
    for number, batch in enumerate(batches([8] * 3)):
        feed([(root, root_box), (leaf, leaf_box)], number, batch)
    sent = [root_box.next("forward") for _ in range(3)]
    assert root.max_held() == 3
    for activations in sent:
        leaf.receive_forward(activations)
        root.receive_backward(leaf_box.next("backward"))
        root_box.next("done")
    assert root.max_held() == 3, "before it looked"
    assert root.max_held() == 0
