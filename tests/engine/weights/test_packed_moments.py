"""Moments in 8 bits: small errors with a mean of zero, a quarter of the memory, and float32 wherever they are read."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from ravnest.engine.corrections.correction import correction_named
from ravnest.engine.stage import Stage
from ravnest.engine.weights.blocks import Blocks
from ravnest.engine.weights.packed_moments import (
    MIN_VALUES,
    PackedMoment,
    moments_in,
    moments_refusal,
    pack_moment,
    unpacked_state,
)
from ravnest.graph.capture.capture import capture
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec
from tests.engine.stages import stages_of

SHAPE = (70, 71)
"""Not a whole number of blocks."""
ADAM = OptimizerSpec("AdamW", {"lr": 0.002})


def a_moment(*, signed: bool) -> torch.Tensor:
    """Values over several decades, as gradients have."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SHAPE, generator=generator) * torch.exp(torch.randn(SHAPE, generator=generator))
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
def test_a_packed_moment_is_near_and_takes_a_quarter(signed: bool) -> None:
    moment = a_moment(signed=signed)
    packed = pack_moment(moment, 3, signed=signed)
    found = packed.unpack()
    assert found.shape == moment.shape
    assert packed.nbytes <= 0.27 * moment.nbytes
    # Between two levels: the relative error of large values is small, and no value is off by more than one level.
    large = moment.abs() > 0.1 * moment.abs().max()
    assert float(((found - moment).abs() / moment.abs())[large].max()) < 0.06
    assert float((found - moment).abs().max()) <= 0.02 * float(moment.abs().max())
    assert bool((found.sign() * moment.sign() >= 0).all())


@pytest.mark.parametrize("signed", [True, False])
def test_the_rounding_has_no_mean_error(signed: bool) -> None:
    moment = a_moment(signed=signed)
    rounds = 400
    mean = sum(pack_moment(moment, n, signed=signed).unpack() for n in range(rounds)) / rounds
    errors = (mean - moment).abs() / moment.abs().clamp(min=1e-12)
    assert float(errors.median()) < 2e-3
    single = (pack_moment(moment, 0, signed=signed).unpack() - moment).abs() / moment.abs().clamp(min=1e-12)
    assert float(single.median()) > 1e-2


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_on_a_level_stays_there(signed: bool) -> None:
    first = pack_moment(a_moment(signed=signed), 0, signed=signed).unpack()
    for updates in range(1, 20):
        assert torch.equal(pack_moment(first, updates, signed=signed).unpack(), first)


def test_a_mean_of_squares_follows_small_changes() -> None:
    """To the nearest level it would never fall."""
    mean = torch.full((MIN_VALUES,), 1.0)
    # One value of each block stays large, so that the scale does.
    mean[::256] = 100.0
    change = torch.where(mean == 100.0, 0.0, 1.0)
    for updates in range(1000):
        packed = pack_moment(mean, updates, signed=False)
        mean = packed.unpack() * (1 - 0.001 * change)
    expected = 0.999**1000
    assert float(mean[change == 1].mean()) == pytest.approx(expected, rel=0.1)


def test_zeros_stay_zero_with_a_sign_and_positive_without() -> None:
    moment = torch.zeros(2, 256)
    moment[0, 0] = 1e-3
    assert torch.equal(pack_moment(moment, 0, signed=True).unpack(), moment)
    squares = pack_moment(moment, 0, signed=False).unpack()
    assert bool((squares[0] > 0).all()), "an update never divides by the epsilon of Adam alone"
    assert bool((squares[1] == 0).all())


@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, lr=0.01),
        partial(Adam, lr=0.01, amsgrad=True),
        partial(NAdam, lr=0.01),
        partial(SGD, lr=0.01, momentum=0.9),
    ],
    ids=["AdamW", "amsgrad", "NAdam", "SGD"],
)
def test_updates_are_near_those_with_float32_moments(make: partial[Optimizer]) -> None:
    torch.manual_seed(0)
    target = torch.randn(SHAPE)
    plain, packed = (nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))
    small = nn.Parameter(torch.zeros(5))
    one, other = make([plain]), make([packed, small])
    moments = moments_in("8bit", other)
    for updates in range(60):
        noise = torch.randn(SHAPE)
        plain.grad, packed.grad = plain.detach() - target + noise, packed.detach() - target + noise
        small.grad = torch.ones(5)
        one.step()
        with moments.unpacked([packed, small], updates):
            other.step()
        assert any(isinstance(value, PackedMoment) for value in other.state[packed].values())
    assert not any(isinstance(value, PackedMoment) for value in other.state[small].values()), "small ones stay"
    moved = plain.detach().norm()
    assert float((packed.detach() - plain.detach()).norm() / moved) < 0.05
    for name, value in unpacked_state(other.state[packed]).items():
        assert isinstance(value, torch.Tensor | float | int), name


def test_an_optimizer_without_such_moments_is_refused_with_the_reason() -> None:
    assert moments_refusal("8bit", ADAM) is None
    assert moments_refusal("float32", OptimizerSpec("Adagrad", {})) is None
    assert "Adam, AdamW, NAdam and SGD" in str(moments_refusal("8bit", OptimizerSpec("Adagrad", {})))
    assert moments_refusal("8bit", OptimizerSpec("SGD", {"lr": 0.1})) == "SGD without momentum has no moments"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def a_stage(moments: str, correction: str = "none") -> tuple[Stage, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    batches = [(torch.randn(8, 20), torch.randint(4, (8,))) for _ in range(2)]
    captured = capture(Wide(), F.cross_entropy, {}, batches)
    stages = stages_of(captured, [captured.graph], ADAM, moments=moments, correction=correction)
    return stages[0], dict(captured.sample)


def train(stage: Stage, sample: dict[str, torch.Tensor], numbers: range) -> float:
    loss = 0.0
    for number in numbers:
        loss = float(stage.forward(number, sample)[str(stage.graph.loss)])
        stage.backward(number, None)
        stage.update(number, flush=True)
    return loss


def held_bytes(stage: Stage) -> int:
    """The optimizer's state in the stage's memory."""
    return sum(
        int(v.nbytes) for state in stage.optimizer.state.values() for v in state.values() if hasattr(v, "nbytes")
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_stage_trains_with_packed_moments_under_every_correction(correction: str) -> None:
    (plain, sample), (packed, _) = a_stage("float32", correction), a_stage("8bit", correction)
    assert train(packed, sample, range(30)) == pytest.approx(train(plain, sample, range(30)), abs=0.02)
    assert held_bytes(packed) < 0.5 * held_bytes(plain)


@pytest.mark.parametrize(("before", "after"), [("float32", "8bit"), ("8bit", "float32"), ("8bit", "8bit")])
def test_a_state_is_float32_and_is_restored_in_either_form(before: str, after: str) -> None:
    stage, sample = a_stage(before)
    train(stage, sample, range(5))
    tensors, metadata = stage.state()
    assert all(t.dtype is torch.float32 for t in tensors.values() if t.is_floating_point())
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optim:"):
            key, _, entry = name.removeprefix("optim:").rpartition(":")
            optimizer.setdefault(key, {})[entry] = tensor.clone()
    other, _ = a_stage(after)
    other.restore(optimizer, metadata)
    for name, tensor in other.state_tensors().items():
        if name.startswith("param:"):
            tensor.copy_(tensors[name])
    found = other.state_tensors()
    for name, tensor in tensors.items():
        if before == after:
            assert torch.equal(found[name], tensor), "packing again changes nothing"
        else:
            assert torch.allclose(found[name], tensor, atol=0.02 * float(tensor.abs().max()) + 1e-12), name
    train(stage, sample, range(5, 8))
    train(other, sample, range(5, 8))
    for name, tensor in stage.state_tensors().items():
        if name.startswith("param:"):
            assert float((other.state_tensors()[name] - tensor).abs().mean()) < 2e-4, name


def test_a_shift_of_moments_reaches_packed_ones() -> None:
    stage, sample = a_stage("8bit")
    train(stage, sample, range(3))
    before = {name: tensor.clone() for name, tensor in stage.state_tensors().items()}
    name = next(name for name, tensor in before.items() if name.endswith(":exp_avg") and tensor.numel() > MIN_VALUES)
    stage.shift({name: torch.full_like(before[name], float(before[name].abs().max()))})
    after = stage.state_tensors()
    change = after[name] - before[name]
    assert float(change.mean()) == pytest.approx(float(before[name].abs().max()), rel=0.02)
    assert all(torch.equal(after[other], tensor) for other, tensor in before.items() if other != name)
    assert held_bytes(stage) < 0.5 * sum(t.nbytes for n, t in after.items() if n.startswith("optim:"))


def test_a_prediction_reads_packed_moments() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(SHAPE))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    correction = correction_named("predict", optimizer, {"weight": parameter})
    moments = moments_in("8bit", optimizer)
    parameter.grad = torch.randn(SHAPE)
    correction.begin_update(2.0, 0)
    [group] = Blocks(optimizer, {"weight": parameter}).groups
    with moments.unpacked([parameter], 0):
        for block in Blocks(optimizer, {"weight": parameter}).of(group):
            correction.step(block)
    before = optimizer.state[parameter]["momentum_buffer"]
    predicted = correction.forward_weights()
    assert predicted is not None
    velocity = unpacked_state(optimizer.state[parameter])["momentum_buffer"]
    assert torch.allclose(predicted["weight"], parameter - 0.4 * 0.1 * velocity, atol=1e-6)
    assert optimizer.state[parameter]["momentum_buffer"] is before, "it stays packed"
