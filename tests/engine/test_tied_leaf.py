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
from ravnest.engine.stage import Stage
from ravnest.errors import PeerError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec
from tests.engine.stages import stages_of

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


@pytest.fixture
def stages(captured: Captured) -> list[Stage]:
    graph = captured.graph
    plan = layout(graph)
    cut = next(cut for cut in plan.cuts if cut > plan.first_use["p_model_first_weight"])
    return stages_of(captured, split(graph, [cut]), SGD)


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
