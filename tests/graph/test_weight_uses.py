"""Which uses of weights may wait: products and convolutions, also of what was made of weights alone, and no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.graph.capture.capture import capture
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program, WeightUse
from ravnest.graph.weight_uses import unread_weights, weight_uses

Tensor = torch.Tensor


class Net(nn.Module):
    """A product with a weight, one with a weight made of two others, and weights that are used in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        made = (self.b * self.scale).t()
        return (F.relu_(self.norm(self.a(x)) @ made) * self.scale) @ self.b


class WritesIntoWeight(nn.Module):
    """Writes into a value computed from a weight, which then no longer counts as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        made = self.a * 2.0
        made[0] = x.sum(0)
        return (x @ made) @ self.b


class NoGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.a(x)
        return self.b(x) + fixed


def graph_of(model: nn.Module) -> tuple[PortableGraph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    batches = [(torch.randn(size, 4), torch.randn(size, 4)) for size in (6, 5)]
    found = capture(model, F.mse_loss, {}, batches)
    weights = {spec.name: found.weights[spec.key].clone() for spec in found.graph.weights}
    return found.graph, dict(found.sample), weights


def by_operator(graph: PortableGraph) -> list[tuple[str, list[str]]]:
    nodes = {node.name: node for node in graph.nodes}
    return [(nodes[name].op.split(".")[1], list(used)) for name, used in weight_uses(graph).items()]


def test_products_may_wait_also_with_what_was_made_of_weights_alone() -> None:
    graph, _, _ = graph_of(Net())
    assert by_operator(graph) == [
        ("linear", ["p_model_a_bias", "p_model_a_weight"]),
        ("matmul", ["t"]),
        ("matmul", ["p_model_b"]),
    ]


def test_what_was_made_of_weights_and_written_to_is_no_weight() -> None:
    graph, _, _ = graph_of(WritesIntoWeight())
    assert by_operator(graph) == [("matmul", ["p_model_b"])]


def test_what_is_computed_without_gradients_has_none_that_could_wait() -> None:
    graph, _, _ = graph_of(NoGradient())
    assert [used for _, used in by_operator(graph)] == [["p_model_b_bias", "p_model_b_weight"]]


@pytest.mark.parametrize("model", [Net, WritesIntoWeight, NoGradient])
def test_set_apart_or_not_the_same_comes_out_and_no_gradient_passes_by(model: type[nn.Module]) -> None:
    graph, sample, weights = graph_of(model())
    for spec in graph.parameters:
        weights[spec.name].requires_grad_()
    program = Program(graph)
    assert program.can_split
    plain = program.run(dict(sample), weights, train=True)[str(graph.loss)]
    apart: list[WeightUse] = []
    found = program.run(dict(sample), weights, train=True, apart=apart)[str(graph.loss)]
    assert torch.equal(plain, found)
    assert len(apart) == len(weight_uses(graph))
    assert all(weight.data_ptr() == leaf.data_ptr() for use in apart for weight, leaf in use.weights)
    only = {name for used in weight_uses(graph).values() for name in used if name in weights}
    reached = torch.autograd.grad(found, [weights[name] for name in sorted(only)], allow_unused=True)
    assert reached == (None,) * len(only)


class TwoTables(nn.Module):
    """One table is only looked up in; the other is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layer(self.positions(numbers) + self.tokens(numbers)) @ self.tokens.weight.t()


def test_the_backward_of_a_table_that_is_only_looked_up_in_does_not_read_it() -> None:
    numbers = torch.randint(5, (3, 2))
    captured = capture(
        TwoTables(), lambda out, y: (out.sum(-1) - y).square().mean(), {}, [(numbers, torch.zeros(3, 2))]
    )
    names = {spec.name: spec.key for spec in captured.graph.parameters}
    assert [names[name] for name in unread_weights(captured.graph)] == ["positions.weight"]


def test_a_backward_may_read_every_weight_of_a_model_without_lookups() -> None:
    captured = capture(Net(), F.mse_loss, {}, [(torch.randn(5, 4), torch.randn(5, 4))])
    assert not unread_weights(captured.graph)
