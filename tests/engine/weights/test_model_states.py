"""Model states change with every forward, but not those that earlier microbatches in flight use."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec


class Scaled(nn.Module):
    """Multiplies by a running mean, so that autograd saves it."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(0.5 * hidden.detach().mean(0))
        return self.last(torch.tanh(hidden * self.average))


@cache
def captured() -> Captured:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return capture(Scaled(), F.mse_loss, {}, [_batch(4, 0), _batch(3, 1)])


@pytest.mark.parametrize("versions", ["stash", "recompute"])
def test_a_backward_uses_the_states_of_its_forward(versions: str) -> None:
    root, batches = _root(versions), [_batch(4, number) for number in range(3)]
    behind = _gradients(root)
    for number, (inputs, _) in enumerate(batches):
        root.forward(number, {"inputs": inputs})
    for number in range(3):
        root.backward(number, behind)
        root.finish_backward()
        root.update(number)
    alone = _root("stash")
    for number, (inputs, _) in enumerate(batches):
        alone.forward(number, {"inputs": inputs})
        alone.backward(number, behind)
        alone.finish_backward()
        alone.update(number)
    _assert_same_gradients(root, alone)
    assert torch.equal(root.state_tensors()["buffer:average"], alone.state_tensors()["buffer:average"])


@pytest.mark.parametrize("versions", ["stash", "recompute"])
def test_a_shift_of_the_states_leaves_microbatches_in_flight_as_they_are(versions: str) -> None:
    root, plain, (inputs, _) = _root(versions), _root(versions), _batch(4, 0)
    behind = _gradients(root)
    for stage in (root, plain):
        stage.forward(0, {"inputs": inputs})
    root.shift({"buffer:average": torch.ones(4)})
    for stage in (root, plain):
        stage.backward(0, behind)
        stage.finish_backward()
        assert stage.update(0, flush=True) is not None
    _assert_same_gradients(root, plain)
    moved = root.state_tensors()["buffer:average"] - plain.state_tensors()["buffer:average"]
    assert torch.allclose(moved, torch.ones(4))


def _assert_same_gradients(one: Stage, other: Stage) -> None:
    """Compares the momenta after a first update, which equal the gradients."""
    found, wanted = one.state_tensors(), other.state_tensors()
    momenta = [name for name in wanted if name.endswith(":momentum_buffer")]
    assert momenta
    for name in momenta:
        assert torch.equal(found[name], wanted[name]), name


def _root(versions: str) -> Stage:
    """The stage before the last layer, with updates of three microbatches."""
    found = captured()
    plan = layout(found.graph)
    (last,) = (spec.name for spec in found.graph.parameters if spec.key == "last.weight")
    part = split(found.graph, [max(cut for cut in plan.cuts if cut <= plan.first_use[last])])[0]
    told = StageSettings(
        optimizer=OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9}).to_json(),
        stages=2,
        accumulate=3,
        in_flight=3,
        versions=versions,
    )
    return Stage(part, {spec.key: found.weights[spec.key].clone() for spec in part.weights}, told)


def _gradients(root: Stage) -> dict[str, torch.Tensor]:
    return {value.name: torch.ones(4, 4) for value in root.graph.sends}


def _batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
