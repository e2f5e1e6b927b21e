"""A leaf that looks rows up for the root, and neighbours that do not keep to the order of things."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.messages import Message
from ravnest.engine.schedule import Task
from ravnest.engine.speed.pretended_pace import NO_PRETENCE, Pace
from ravnest.engine.stage import Stage
from ravnest.engine.stage_tasks import StageTasks
from ravnest.engine.telemetry.counters import Counters
from ravnest.engine.telemetry.measurements import Measurements
from ravnest.errors import PeerError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec
from tests.engine.stages import SilentOutbox, stages_of

SGD = OptimizerSpec("SGD", {"lr": 0.1})
VOCABULARY, WIDTH = 20, 6


class NormedHead(nn.Module):
    """A tied model with a batch norm right before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.embedding(tokens)))))
        return F.linear(self.norm(hidden), self.embedding.weight)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    batches = [(torch.randint(0, VOCABULARY, (size,)), torch.randint(0, VOCABULARY, (size,))) for size in (8, 5)]
    return capture(NormedHead(), F.cross_entropy, {}, batches)


def two_stages(captured: Captured, **settings: Any) -> list[Stage]:
    graph = captured.graph
    plan = layout(graph)
    cut = next(cut for cut in plan.cuts if cut > plan.first_use["p_model_first_weight"])
    return stages_of(captured, split(graph, [cut]), SGD, **settings)


@pytest.fixture
def stages(captured: Captured) -> list[Stage]:
    return two_stages(captured)


def fed(captured: Captured) -> dict[str, Any]:
    return dict(captured.sample)


def test_a_lookup_changes_no_state_of_the_leaf(captured: Captured, stages: list[Stage]) -> None:
    root, leaf = stages
    assert leaf.graph.lookups and leaf.graph.states, "the batch norm is the leaf's"
    before = {name: tensor.clone() for name, tensor in leaf.state_tensors().items()}
    values = fed(captured)
    rows = leaf.look_up(0, values)
    assert all(torch.equal(tensor, before[name]) for name, tensor in leaf.state_tensors().items())
    assert leaf.in_flight == 1
    sent = root.forward(0, {v.name: (values | rows)[v.name] for v in (*root.graph.inputs, *root.graph.from_stages)})
    leaf.forward(0, {v.name: (values | sent)[v.name] for v in (*leaf.graph.inputs, *leaf.graph.from_stages)})
    back = root.backward(0, leaf.backward(0, None))
    leaf.add_row_gradients(0, back)
    assert back.keys() == rows.keys() and leaf.in_flight == 0
    update = leaf.update(0)
    assert update is not None and update.rows == (0,)


def test_rows_that_come_back_without_a_gradient_make_no_update(captured: Captured, stages: list[Stage]) -> None:
    leaf = stages[1]
    leaf.look_up(0, fed(captured))
    leaf.add_row_gradients(0, {})
    assert leaf.update(0, flush=True) is None and leaf.version == 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_rows_that_an_earlier_update_lacked_have_the_weight_that_they_would_have_had_in_it(
    captured: Captured, accumulate: int
) -> None:
    leaf = two_stages(captured, accumulate=accumulate)[1]
    before = leaf.state_tensors()["param:embedding.weight"].clone()
    rows = leaf.look_up(0, fed(captured))
    leaf.add_row_gradients(0, {name: torch.ones_like(tensor) for name, tensor in rows.items()})
    update = leaf.update(0, flush=True)
    assert update is not None and update.rows == (0,) and leaf.version == 1
    [tokens] = (fed(captured)[v.name] for v in leaf.graph.inputs if v.name == "inputs")
    counts = torch.bincount(tokens, minlength=VOCABULARY).float()[:, None].expand(-1, WIDTH)
    assert torch.allclose(before - leaf.state_tensors()["param:embedding.weight"], 0.1 / accumulate * counts)


def test_a_microbatch_is_done_when_its_rows_are_back_although_the_held_update_waits_for_others(
    captured: Captured,
) -> None:
    leaf = two_stages(captured)[1]
    outbox, values = _Done(), fed(captured)
    inbox = Inbox(leaf.graph, leaf.settings, applied := Applied(), announced=True)
    tasks = StageTasks(
        leaf, outbox, inbox, applied, Measurements(Counters(), Pace(NO_PRETENCE, leaf.device, False), outbox.worked)
    )
    root = two_stages(captured)[0]
    rows: dict[int, dict[str, Any]] = {}
    for number in range(3):
        own = {v.name: values[v.name] for v in leaf.graph.inputs}
        inbox.feed(Message(number, own))
        tasks.run(Task.LOOKUP, inbox.take(Task.LOOKUP))
        rows[number] = outbox.sent.pop()
    for number in range(2):
        given = {v.name: (values | rows[number])[v.name] for v in (*root.graph.inputs, *root.graph.from_stages)}
        inbox.receive_forward(Message(number, root.forward(number, given)))
        tasks.run(Task.FORWARD, inbox.take(Task.FORWARD))
    assert leaf.version == 1, "the update of microbatch 1 waits for its rows"
    inbox.receive_backward(Message(0, {name: torch.zeros_like(row) for name, row in rows[0].items()}))
    tasks.run(Task.BACKWARD, inbox.take(Task.BACKWARD))
    assert outbox.finished == [0] and leaf.version == 2 and 0 in applied
    assert 1 not in applied and applied.has_own(1)


class _Done(SilentOutbox):
    """Keeps the rows that were sent, and the microbatches that are done."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.finished: list[int] = []

    def forward(self, message: Message) -> None:
        self.sent.append(dict(message.values))

    def done(self, message: Message) -> None:
        self.finished.append(message.microbatch)


def test_a_microbatch_counts_once_towards_the_most_that_may_wait_wherever_it_is(
    captured: Captured, stages: list[Stage]
) -> None:
    _, leaf = stages
    values = fed(captured)
    own = {v.name: values[v.name] for v in leaf.graph.inputs}

    def accepted(looked_up: bool) -> int:
        inbox = Inbox(leaf.graph, leaf.settings, Applied(), announced=True)
        for number in range(10_000):
            try:
                inbox.feed(Message(number, own))
            except PeerError as error:
                assert "more than can be in flight" in str(error)
                return number
            if looked_up:
                inbox.take(Task.LOOKUP)
        raise AssertionError("there is no limit")

    assert accepted(looked_up=True) == accepted(looked_up=False) >= 64


def test_activations_and_gradients_are_refused_before_their_time(captured: Captured, stages: list[Stage]) -> None:
    root, leaf = stages
    inbox = Inbox(leaf.graph, leaf.settings, Applied(), announced=True)
    values = fed(captured)
    inbox.feed(Message(0, {v.name: values[v.name] for v in leaf.graph.inputs}))
    rows = leaf.look_up(0, values)
    sent = root.forward(0, {v.name: (values | rows)[v.name] for v in (*root.graph.inputs, *root.graph.from_stages)})
    with pytest.raises(PeerError, match="before its rows were sent"):
        inbox.receive_forward(Message(0, sent))
    assert inbox.take(Task.LOOKUP).microbatch == 0
    with pytest.raises(PeerError, match="does not wait for any"):
        inbox.receive_backward(Message(0, rows))
    inbox.receive_forward(Message(0, sent))
    assert inbox.ready().forwards == 1 and inbox.ready().lookups == 0
