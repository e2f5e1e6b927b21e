"""The policy "in_place": kept activations, and a backward that reads the weights as they are when it runs.

The reference computes the promise with plain autograd: a forward over copies of the weights that it used, into which
the current weights are written before the backward.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ravnest.engine.corrections.correction import PREDICTING
from ravnest.engine.passes.saved_weights import CurrentWeights, SavedWeights
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
    running: dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, have = self.stage.graph, self.stage.state_tensors()
        self.program = Program(graph)
        self.weights = {p.name: torch.nn.Parameter(have[f"param:{p.key}"].clone()) for p in graph.parameters}
        self.states = {s.name: have[f"buffer:{s.key}"].clone() for s in graph.states}
        self.optimizer = torch.optim.SGD(list(self.weights.values()), lr=0.05, momentum=0.9)

    def forward(self, microbatch: int, given: dict[str, Any]) -> None:
        """Call it before the stage's own forward."""
        used = self.stage.correction.forward_weights() or self.weights
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in used.items()}
        self.states = {name: state.clone() for name, state in self.states.items()}
        results = self.program.run(given, {**leaves, **self.states, **self.constants}, train=True, seed=0, microbatch=microbatch)
        self.running[microbatch] = leaves, results

    def backward(self, microbatch: int, gradients: dict[str, torch.Tensor]) -> None:
        leaves, results = self.running.pop(microbatch)
        for name, leaf in leaves.items():
            leaf.data.copy_(self.weights[name])
        outputs = [results[name] for name in gradients]
        found = torch.autograd.grad(outputs, list(leaves.values()), list(gradients.values()), allow_unused=True)
        for weight, gradient in zip(self.weights.values(), found, strict=True):
            weight.grad = gradient
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return {f"param:{p.key}": self.weights[p.name].detach() for p in self.stage.graph.parameters}


def driven(name: str, microbatches: int, **settings: Any) -> tuple[Line, Reference]:
    """A line and the reference of its root after this many microbatches, all with several in flight."""
    line = Line(name, 3, MOMENTUM, versions="in_place", **settings)
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


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("correction", ["none", "predict"])
@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "in_place", "unet", "hf_gpt2", "gru"])
def test_a_backward_reads_the_weights_of_now(name: str, correction: str, split_backward: bool) -> None:
    line, reference = driven(name, 12, correction=correction, split_backward=split_backward)
    root = line.stages[0]
    assert root.version == 9
    have = {key: tensor for key, tensor in root.state_tensors().items() if key.startswith("param:")}
    worst, where = worst_difference(have, reference.state())
    assert worst <= 1e-6, f"{where} is off by {worst:.1e}"


@pytest.mark.parametrize("correction", ["none", "predict"])
def test_it_differs_from_the_weights_of_the_forward(correction: str) -> None:
    line, _ = driven("gpt_tied", 12, correction=correction)
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
def test_updates_are_in_place_and_a_forward_holds_no_predicted_weights(
    name: str, correction: str, split_backward: bool
) -> None:
    line = Line(name, 3, MOMENTUM, versions="in_place", correction=correction, split_backward=split_backward)
    # A leaf keeps everything; in a pipeline its backward follows at once.
    stages = line.stages[:-1]
    before = [_places(stage) for stage in stages]
    predicts = 0
    with kept_generator():
        for number in range(10):
            predicted = [_storages(stage.correction.forward_weights()) for stage in stages]
            references = [[torch._C._storage_Use_Count(each._cdata) for each in stage] for stage in predicted]
            line.forward(number)
            assert references == [[torch._C._storage_Use_Count(each._cdata) for each in stage] for stage in predicted]
            predicts += sum(map(len, predicted))
            del predicted
            if number >= IN_FLIGHT - 1:
                line.backward(number - IN_FLIGHT + 1)
            assert [stage.versions_alive for stage in stages] == [1] * len(stages)
    assert stages[0].in_flight == IN_FLIGHT - 1
    assert bool(predicts) == (correction in PREDICTING)
    assert before == [_places(stage) for stage in stages]


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


def _storages(weights: dict[str, torch.Tensor] | None) -> list[torch.UntypedStorage]:
    return [weight.untyped_storage() for weight in (weights or {}).values()]
