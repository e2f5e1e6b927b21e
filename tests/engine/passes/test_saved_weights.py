"""The policies "in_place" and "stash_8bit": kept activations, and a backward with other weights than the forward's.

The reference computes the promise with plain autograd: a forward over copies of the weights that it used, into which
other weights are written before the backward: the current ones, or the forward's own in 8 bits.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from ravnest.engine.corrections.correction import PREDICTING
from ravnest.engine.passes import saved_weights
from ravnest.engine.passes.saved_weights import CodedWeights, CurrentWeights, SavedWeights
from ravnest.engine.stage import Stage
from ravnest.graph.program import Program
from ravnest.spec import OptimizerSpec
from tests.engine.driven_line import Line
from tests.exactness.plain_loop import copied, kept_generator, worst_difference

MOMENTUM = OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9})
IN_FLIGHT = 4


@dataclass
class Reference:
    """A stage in plain PyTorch, given the same values and gradients as the stage that is tested."""

    stage: Stage
    constants: dict[str, torch.Tensor]
    program: Program = field(init=False)
    weights: dict[str, torch.nn.Parameter] = field(init=False)
    running: dict[int, tuple[dict[str, torch.Tensor], dict[str, Any], int | None]] = field(default_factory=dict)
    """Of each microbatch, the weights, the results, and the updates by then; None if the weights were predicted."""
    updates: int = 0

    def __post_init__(self) -> None:
        graph, have = self.stage.graph, self.stage.state_tensors()
        self.program = Program(graph)
        self.weights = {p.name: torch.nn.Parameter(have[f"param:{p.key}"].clone()) for p in graph.parameters}
        self.states = {s.name: have[f"buffer:{s.key}"].clone() for s in graph.states}
        self.optimizer = torch.optim.SGD(list(self.weights.values()), lr=0.05, momentum=0.9)

    def forward(self, microbatch: int, given: dict[str, Any]) -> None:
        """Call it before the stage's own forward."""
        predicted = self.stage.correction.forward_weights()
        used = predicted or self.weights
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in used.items()}
        self.states = {name: state.clone() for name, state in self.states.items()}
        results = self.program.run(
            given, {**leaves, **self.states, **self.constants}, train=True, seed=0, microbatch=microbatch
        )
        self.running[microbatch] = leaves, results, None if predicted else self.updates

    def backward(self, microbatch: int, gradients: dict[str, torch.Tensor]) -> None:
        leaves, results, updates = self.running.pop(microbatch)
        for name, leaf in leaves.items():
            if self.stage.settings.versions == "in_place":
                leaf.data.copy_(self.weights[name])
            elif updates != self.updates:
                leaf.data.copy_(in_8_bits(leaf))
        outputs = [results[name] for name in gradients]
        found = torch.autograd.grad(outputs, list(leaves.values()), list(gradients.values()), allow_unused=True)
        for weight, gradient in zip(self.weights.values(), found, strict=True):
            weight.grad = gradient
        self.optimizer.step()
        self.updates += 1

    def state(self) -> dict[str, torch.Tensor]:
        return {f"param:{p.key}": self.weights[p.name].detach() for p in self.stage.graph.parameters}


def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 127 steps of the largest value of each 256."""
    rows = torch.nn.functional.pad(weight.detach().flatten(), (0, -weight.numel() % 256)).view(-1, 256)
    step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-38)
    return ((rows / step).round() * step).flatten()[: weight.numel()].view(weight.shape)


@pytest.fixture(autouse=True)
def _codes_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small."""
    monkeypatch.setattr(saved_weights, "MIN_CODED", 1)


def driven(name: str, microbatches: int, **settings: Any) -> tuple[Line, Reference]:
    """A line and the reference of its root after this many microbatches, all with several in flight."""
    line = Line(name, 3, MOMENTUM, **settings)
    root = line.stages[0]
    reference = Reference(root, {c.name: line.example.captured.weights[c.key] for c in root.graph.constants})
    line.stages[0] = _Recording(root, reference)  # type: ignore[call-overload]
    with kept_generator():
        for number in range(microbatches):
            line.forward(number)
            if number >= IN_FLIGHT - 1:
                line.backward(number - IN_FLIGHT + 1)
    line.stages[0] = root
    return line, reference


class _Recording:
    """Hands what the root gets to the reference too."""

    def __init__(self, stage: Stage, reference: Reference) -> None:
        self._stage, self._reference = stage, reference

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, microbatch: int, values: dict[str, Any]) -> dict[str, Any]:
        self._reference.forward(microbatch, copied(values))
        return self._stage.forward(microbatch, values)

    def backward(self, microbatch: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._reference.backward(microbatch, {name: gradient.clone() for name, gradient in gradients.items()})
        return self._stage.backward(microbatch, gradients)


BOTH = ("in_place", "stash_8bit")


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("correction", ["none", "predict"])
@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "in_place", "unet", "hf_gpt2", "gru"])
@pytest.mark.parametrize("versions", BOTH)
def test_a_backward_uses_the_weights_that_the_policy_says(
    versions: str, name: str, correction: str, split_backward: bool
) -> None:
    line, reference = driven(name, 12, versions=versions, correction=correction, split_backward=split_backward)
    root = line.stages[0]
    assert root.version == 9
    have = {key: tensor for key, tensor in root.state_tensors().items() if key.startswith("param:")}
    worst, where = worst_difference(have, reference.state())
    assert worst <= 2e-6, f"{where} is off by {worst:.1e}"


@pytest.mark.parametrize("versions", BOTH)
@pytest.mark.parametrize("correction", ["none", "predict"])
def test_the_result_differs_from_that_of_stashed_weights(versions: str, correction: str) -> None:
    line, _ = driven("gpt_tied", 12, versions=versions, correction=correction)
    stashed = Line("gpt_tied", 3, MOMENTUM, correction=correction)
    with kept_generator():
        for number in range(12):
            stashed.forward(number)
            if number >= IN_FLIGHT - 1:
                stashed.backward(number - IN_FLIGHT + 1)
    assert worst_difference(line.state(), stashed.state())[0] > 1e-4


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("correction", ["predict", "foresight", "cautious", "nesterov", "none"])
@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "hf_gpt2"])
@pytest.mark.parametrize("versions", BOTH)
def test_updates_are_in_place_and_a_forward_holds_no_predicted_weights(
    monkeypatch: pytest.MonkeyPatch, versions: str, name: str, correction: str, split_backward: bool
) -> None:
    line = Line(name, 3, MOMENTUM, versions=versions, correction=correction, split_backward=split_backward)
    # A leaf keeps everything; in a pipeline its backward follows at once.
    stages = line.stages[:-1]
    before = [_places(stage) for stage in stages]
    predicted: list[weakref.ref[Any]] = []
    for stage in stages:
        forward_weights = partial(_tracked, stage.correction.forward_weights, predicted)
        monkeypatch.setattr(stage.correction, "forward_weights", forward_weights)
    with kept_generator():
        for number in range(10):
            line.forward(number)
            assert not any(memory() is not None for memory in predicted)
            if number >= IN_FLIGHT - 1:
                line.backward(number - IN_FLIGHT + 1)
            assert [stage.versions_alive for stage in stages] == [1] * len(stages)
    assert stages[0].in_flight == IN_FLIGHT - 1
    assert bool(predicted) == (correction in PREDICTING)
    assert before == [_places(stage) for stage in stages]


def test_weights_in_8_bits_are_used_too_by_a_forward_that_is_recomputed() -> None:
    line, plain = (Line("hf_gpt2", 3, MOMENTUM, versions="stash_8bit") for _ in range(2))
    with kept_generator():
        for each in (line, plain):
            stage = each.stages[0]
            if each is line:
                assert stage.start_recomputing()
            each.forward(0)
            each.forward(1)
            each.backward(0)
            each.forward(2)
            each.backward(1)
    have, want = line.state(), plain.state()
    worst, where = worst_difference(have, want)
    assert 0 < worst < 0.02, f"{where}: the recomputed activations are those of the weights in 8 bits"


def test_an_embedding_is_not_kept_because_its_backward_does_not_need_it() -> None:
    table, layer = torch.randn(100, 8), torch.randn(8, 8)
    leaves = {"table": table.clone().requires_grad_(), "layer": layer.clone().requires_grad_()}
    coded = CodedWeights(leaves)
    weights = SavedWeights(leaves, coded)
    with weights.saving():
        rows = torch.nn.functional.embedding(torch.tensor([3, 4]), leaves["table"])
        result = torch.nn.functional.linear(rows, leaves["layer"])
    coded.settle()
    weights.release(leaves.values(), {"table": torch.zeros(100, 8), "layer": torch.zeros(8, 8)})
    assert coded.leaves().keys() == {"layer"}
    result.sum().backward()
    assert leaves["table"].grad is not None
    expected = torch.ones(2, 8) @ in_8_bits(layer)
    assert torch.allclose(leaves["table"].grad[[3, 4]], expected, atol=1e-6)


def test_with_one_in_flight_weights_are_not_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("coded")

    line = Line("hf_gpt2", 3, MOMENTUM, versions="stash_8bit", correction="predict")
    monkeypatch.setattr(saved_weights.CODEC, "encode", refuse)
    with kept_generator():
        for number in range(4):
            line.forward(number)
            line.backward(number)
        line.forward(4)
        line.forward(5)
        with pytest.raises(AssertionError, match="coded"):
            line.backward(4)


def test_a_value_that_was_changed_after_its_forward_is_refused_as_autograd_does() -> None:
    weight, given = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    weights = SavedWeights({"weight": weight}, CurrentWeights(lambda: {"weight": weight}))
    with weights.saving():
        product = given * weight
        result = product.square().sum()
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after its forward"):
        result.backward()


def test_views_of_a_weight_are_read_at_the_same_place_of_the_current_one() -> None:
    used, now = torch.randn(4, 6), torch.randn(4, 6)
    leaf, given = used.clone().requires_grad_(), torch.randn(3, 2, requires_grad=True)
    weights = SavedWeights({"weight": leaf}, CurrentWeights(lambda: {"weight": now}))
    with weights.saving():
        result = given @ leaf[1:3, 2:5]
    weights.release([leaf], {"weight": now})
    assert leaf.data_ptr() == now.data_ptr()
    assert torch.equal(result, given @ used[1:3, 2:5])
    result.sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, torch.ones(3, 3) @ now[1:3, 2:5].t())


def _places(stage: Stage) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in stage.state_tensors().items() if name.startswith("param:")}


def _tracked(
    forward_weights: Callable[[], dict[str, torch.Tensor] | None], memory: list[weakref.ref[Any]]
) -> dict[str, torch.Tensor] | None:
    """The predicted weights in the memory of arrays, which live as long as any tensor over them."""
    weights = forward_weights()
    if weights is None:
        return None
    arrays = {name: weight.detach().numpy().copy() for name, weight in weights.items()}
    memory.extend(weakref.ref(array) for array in arrays.values())
    return {name: torch.from_numpy(array).requires_grad_() for name, array in arrays.items()}
