"""Origin of values that are not finite: data, a parameter or an operator, but never the infinities of a mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.engine.finite_checks.origin import ForwardDiagnosis, diagnose_forward, state_of, steep
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.program import Program
from tests.e2e.jobs import CLASSES, FEATURES, batches


class Net(nn.Module):
    """A masked softmax, whose infinities are meant, and a function in the middle."""

    def __init__(self, function: str = "relu") -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        mask = torch.full((8, 8), float("-inf")).triu(1)
        weights = (h.unsqueeze(-1) * h.unsqueeze(-2) + mask).softmax(-1)
        h = (weights @ h.unsqueeze(-1)).squeeze(-1)
        h = self.middle(h).relu()
        h = {"relu": F.relu, "log": torch.log, "log times zero": lambda t: t.log() * 0, "rsqrt": torch.rsqrt}[
            self.function
        ](h)
        return self.last(h)


def found(net: Net, inputs: torch.Tensor | None = None) -> ForwardDiagnosis:
    data = batches([8, 5])
    got = capture(net, F.cross_entropy, {}, data)
    weights = {w.name: got.weights[w.key] for w in got.graph.weights}
    given = {"inputs": data[0][0] if inputs is None else inputs, "targets": data[0][1]}
    return diagnose_forward(got.graph, Program(got.graph), given, weights, 0, 3)


def a_net(function: str = "relu") -> Net:
    torch.manual_seed(0)
    return Net(function)


def test_infinities_of_a_mask_are_ignored() -> None:
    assert found(a_net()) == ForwardDiagnosis("", "finite")


@pytest.mark.parametrize(("function", "operator"), [("log", "log"), ("log times zero", "log"), ("rsqrt", "rsqrt")])
def test_the_operator_that_left_its_domain_is_named(function: str, operator: str) -> None:
    finding = found(a_net(function))
    assert finding.kind == "operator" and finding.sent == "nan"
    assert finding.where.startswith(f"the operator {operator} (behind middle.weight) yields values that are not finite")
    assert "from numbers between 0 and" in finding.where and "learning rate" not in finding.where


def test_nan_in_the_data_names_the_input_and_the_samples() -> None:
    inputs = torch.zeros(8, FEATURES)
    inputs[2, 1] = inputs[5, 0] = torch.nan
    finding = found(a_net("log"), inputs)
    assert (finding.kind, finding.where) == (
        "data",
        "the input inputs holds NaN: clean sample 2, 5 of that batch (counted from 0)",
    )


def test_infinities_in_the_data_name_the_input() -> None:
    inputs = torch.zeros(8, FEATURES)
    inputs[7] = torch.inf
    assert "the input inputs holds infinities: clean sample 7" in found(a_net(), inputs).where


def test_a_parameter_that_is_not_finite_is_named() -> None:
    net = a_net()
    with torch.no_grad():
        net.middle.weight[0, 0] = torch.nan
    finding = found(net)
    assert finding.kind == "parameter" and "middle.weight is not finite: lower the learning rate" in finding.where


def test_values_that_have_diverged_are_attributed_to_the_learning_rate() -> None:
    net = a_net()
    with torch.no_grad():
        net.last.weight.fill_(1e38)
        net.last.bias.fill_(3e38)
    finding = found(net)
    assert finding.kind == "operator" and "training has diverged; lower the learning rate" in finding.where


def test_nan_that_arrives_is_not_attributed_to_this_stage() -> None:
    data = batches([8, 5])
    got = capture(a_net(), F.cross_entropy, {}, data)
    leaf = split(got.graph, layout(got.graph).cuts[-1:])[1]
    weights = {w.name: got.weights[w.key] for w in leaf.weights}
    shapes = {v.name: [8 if isinstance(s, str) else s for s in v.shape] for v in leaf.receives}
    given = {"targets": data[0][1], **{name: torch.full(shape, torch.nan) for name, shape in shapes.items()}}
    assert diagnose_forward(leaf, Program(leaf), given, weights, 0, 0) == ForwardDiagnosis("nan", "nan")


def test_operators_with_steep_gradients_are_listed() -> None:
    got = capture(a_net("rsqrt"), F.cross_entropy, {}, batches([8, 5]))
    assert "rsqrt (behind middle.weight)" in steep(got.graph)


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (torch.ones(2), "finite"),
        (torch.tensor([1, 2]), "finite"),
        (torch.tensor([1.0, -torch.inf]), "infinite"),
        (torch.tensor([torch.inf, torch.nan]), "nan"),
        (float("nan"), "nan"),
        (3, "finite"),
        ((torch.ones(1), torch.tensor(torch.inf)), "infinite"),
    ],
)
def test_the_state_of_a_value(value: object, state: str) -> None:
    assert state_of(value) == state
