"""Lookups of tied weights: who does them, what crosses the cuts then, and which graphs are refused."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import GraphError
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.graph.portable_reader import read_graph

VOCABULARY, WIDTH = 30, 8


class Parts(nn.Module):
    """An encoder and a decoder with their embeddings, heads and layers."""

    def __init__(self, forward: Callable[["Parts", Tensor, Tensor], Tensor], *, by_frequency: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=by_frequency)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._forward = forward

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self._forward(self, source, target)


def _tied(parts: Parts, source: Tensor, target: Tensor) -> Tensor:
    hidden = parts.embedding(source)
    for layer in parts.layers:
        hidden = torch.tanh(layer(hidden))
    return F.linear(hidden, parts.embedding.weight)


def _three_uses(parts: Parts, source: Tensor, target: Tensor) -> Tensor:
    encoded = torch.tanh(parts.layers[1](torch.tanh(parts.layers[0](parts.embedding(source)))))
    decoded = torch.tanh(parts.layers[2](parts.embedding(target) + encoded))
    return F.linear(torch.tanh(parts.layers[3](decoded)), parts.embedding.weight)


def _shared(parts: Parts, source: Tensor, target: Tensor) -> Tensor:
    encoded = torch.tanh(parts.layers[1](torch.tanh(parts.layers[0](parts.embedding(source)))))
    decoded = torch.tanh(parts.layers[2](parts.embedding(target) + encoded))
    return parts.head(torch.tanh(parts.layers[3](decoded)))


def _used_first(parts: Parts, source: Tensor, target: Tensor) -> Tensor:
    hidden = F.one_hot(source, VOCABULARY).float() @ parts.embedding.weight
    for layer in parts.layers:
        hidden = torch.tanh(layer(hidden))
    return parts.head(hidden + parts.embedding(target))


def _used_early(parts: Parts, source: Tensor, target: Tensor) -> Tensor:
    hidden = parts.embedding(source)
    hidden = F.linear(F.linear(hidden, parts.embedding.weight), parts.embedding.weight.T)
    for layer in parts.layers:
        hidden = torch.tanh(layer(hidden))
    return parts.head(hidden)


def _graph(forward: Callable[[Parts, Tensor, Tensor], Tensor], *, by_frequency: bool = False) -> PortableGraph:
    torch.manual_seed(0)
    model = Parts(forward, by_frequency=by_frequency)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    batches = []
    for size in (4, 3):
        source, target = (torch.randint(0, VOCABULARY, (size, 5)) for _ in range(2))
        batches.append(((source, target), target.clone()))
    return capture(model, loss, {}, batches).graph


def _crossing(graph: PortableGraph) -> set[str]:
    """The parameters that cross any cut, by key."""
    keys = {p.name: p.key for p in graph.parameters}
    return {keys[v.name] for values in layout(graph).crossing.values() for v in values if v.name in keys}


@pytest.mark.parametrize(("forward", "lookups"), [(_tied, 1), (_three_uses, 2)])
def test_the_leaf_looks_up_what_is_used_before_its_head(
    forward: Callable[[Parts, Tensor, Tensor], Tensor], lookups: int
) -> None:
    graph = _graph(forward)
    plan = layout(graph)
    assert len(plan.ahead) == lookups and not _crossing(graph)
    for cut in plan.cuts:
        root, leaf = split(graph, [cut])
        assert root.rows == leaf.lookups and len(root.rows) == lookups
        assert "embedding.weight" in {p.key for p in leaf.parameters}
        assert "embedding.weight" not in {p.key for p in root.parameters}
    (whole,) = split(graph, [])
    assert not whole.rows and not whole.lookups


@pytest.mark.parametrize("forward", [_shared, _used_first])
def test_a_lookup_behind_another_use_moves_to_it(forward: Callable[[Parts, Tensor, Tensor], Tensor]) -> None:
    graph = _graph(forward)
    assert not layout(graph).ahead
    cuts = [cut for cut, values in layout(graph).crossing.items() if not {v.name for v in values} & _names(graph)]
    parts = [split(graph, [cut]) for cut in cuts]
    assert any(all(part.parameters for part in pair) for pair in parts), "it can be cut without sending the parameter"
    assert all("embedding.weight" in {p.key for p in root.parameters} for root, _ in parts)


def _names(graph: PortableGraph) -> set[str]:
    return {p.name for p in graph.parameters}


@pytest.mark.parametrize(("forward", "by_frequency"), [(_used_early, False), (_tied, True)])
def test_a_parameter_crosses_if_the_leaf_would_hold_too_much_or_its_gradient_is_no_sum(
    forward: Callable[[Parts, Tensor, Tensor], Tensor], by_frequency: bool
) -> None:
    graph = _graph(forward, by_frequency=by_frequency)
    assert not layout(graph).ahead
    assert "embedding.weight" in _crossing(graph)


def test_stages_that_run_one_after_the_other_need_no_rows() -> None:
    graph = _graph(_tied)
    plan = layout(graph, lookups_apart=False)
    root, leaf = split(graph, [plan.cuts[0]], lookups_apart=False)
    assert not root.rows and not leaf.lookups
    assert {"embedding.weight"} <= {p.key for p in root.parameters}


def test_a_graph_whose_lookups_are_none_is_refused() -> None:
    graph = _graph(_tied)
    root, leaf = split(graph, [layout(graph).cuts[3]])
    assert read_graph(leaf.to_json()).lookups == leaf.lookups and read_graph(root.to_json()).rows == root.rows
    other = replace(leaf, lookups=(replace(leaf.lookups[0], name=leaf.nodes[-1].name),))
    with pytest.raises(GraphError, match="which is no lookup in its own weights"):
        read_graph(other.to_json())
    with pytest.raises(GraphError, match="not the last of several stages"):
        read_graph(replace(graph, lookups=leaf.lookups).to_json())
    with pytest.raises(GraphError, match="not the first of several stages"):
        read_graph(replace(leaf, lookups=(), rows=(replace(root.rows[0], name="more"),)).to_json())


def test_a_graph_without_these_fields_has_none() -> None:
    graph = _graph(_shared)
    data = json.loads(graph.to_json())
    del data["rows"], data["lookups"]
    found = read_graph(json.dumps(data))
    assert found.rows == found.lookups == ()
