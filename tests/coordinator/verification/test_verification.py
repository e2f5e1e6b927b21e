"""The check of a written model: how much of it is looked at, what counts as the same, and models larger than memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ravnest.coordinator.feed.feeder import EvalBatch
from ravnest.coordinator.verification.decisions import compare_scores, effort, tolerance
from ravnest.coordinator.verification.evaluate_file import (
    check_model,
    computes_in_halves,
    cut_to_fit,
    weights_of,
)
from ravnest.coordinator.verification.reported_scores import ReportedScores, Witness, shortened
from ravnest.errors import RunError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.switch import draws_in_evaluation
from tests.e2e.jobs import CLASSES, FEATURES, accuracy, batches

EXACT = tolerance(False, False)


class Deep(nn.Module):
    """Batch norms, a buffer that no state_dict has, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU()) for _ in range(4)
        )
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((FEATURES,), 0.5), persistent=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.last(x) * self.scale)


def captured() -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Deep()
    return model, capture(model, F.cross_entropy, {"accuracy": accuracy}, batches([8, 5]))


def a_sample(model: nn.Module, sizes: list[int]) -> list[ReportedScores]:
    """Batches, with what an honest swarm reports of this model."""
    model.eval()
    found = []
    for number, (inputs, targets) in enumerate(batches(sizes, seed=3)):
        with torch.no_grad():
            outputs = model(inputs)
        scores = {"loss": float(F.cross_entropy(outputs, targets)), "accuracy": float(accuracy(outputs, targets))}
        batch = EvalBatch(-1 - number, {"inputs": inputs, "targets": targets}, len(targets))
        found.append(ReportedScores(batch, "leaf", scores))
    return found


def checked(path: Path, free_bytes: int = 1 << 40, **changes: Any) -> Any:
    model, found = captured()
    sample = a_sample(model, [8, 8, 3])
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved.update(changes)
    save_file(saved, path)
    constants = {spec.key: found.weights[spec.key] for spec in found.graph.constants}
    read = weights_of(path, found.aliases, constants)
    return check_model(found.graph, read, sample, effort(60.0, 0.001, 8), EXACT, free_bytes, 0)


def test_the_model_that_was_evaluated_is_what_it_says(tmp_path: Path) -> None:
    found = checked(tmp_path / "model.safetensors")
    assert found.comparison.passed and (found.samples, found.batches) == (19, 3), found
    assert found.measured["loss"] == pytest.approx(found.reported["loss"], rel=1e-6)


def test_a_model_larger_than_memory_is_checked_part_by_part(tmp_path: Path) -> None:
    _, found = captured()
    parts = cut_to_fit(found.graph, 700)
    assert len(parts) > 3 and sum(part.loss is not None for part in parts) == 1
    assert len(cut_to_fit(found.graph, 1 << 20)) == 1
    whole, in_parts = (checked(tmp_path / "model.safetensors", free_bytes) for free_bytes in (1 << 20, 700))
    assert in_parts.comparison.passed and in_parts.batches == 3
    assert whole.comparison.passed


@pytest.mark.parametrize("free_bytes", [1 << 20, 700], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", ["layers.1.0.weight", "layers.2.1.running_var", "head.bias"])
def test_one_tensor_that_is_not_what_was_evaluated_is_found(name: str, free_bytes: int, tmp_path: Path) -> None:
    shape = captured()[0].state_dict()[name].shape
    found = checked(tmp_path / "model.safetensors", free_bytes, **{name: 5 + 50 * torch.rand(shape)})
    assert not found.comparison.passed and "the file gives and the swarm reported: loss" in found.comparison.reason


def test_a_file_that_lacks_a_tensor_is_one_sentence(tmp_path: Path) -> None:
    _, found = captured()
    save_file({"head.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"lacks layers\.0\.0\.weight, which the model has"):
        weights_of(tmp_path / "model.safetensors", {}, {})(found.graph)


def test_how_much_is_checked_follows_from_how_long_the_run_took_and_how_slow_a_batch_is_here() -> None:
    short, long, slow = effort(15.0, 0.001, 32), effort(36_000.0, 0.001, 32), effort(3_600.0, 720.0, 32)
    assert (short.seconds, short.max_samples, short.batches) == (0.3, None, 300)
    assert (long.seconds, long.max_samples) == (120.0, None)
    assert slow.max_samples == 3 and "a whole one takes about 720.0 s here" in slow.reason
    assert effort(10.0, 1e6, 32).max_samples == 1, "one sample is always looked at"


def test_rounding_is_the_same_and_a_lie_is_not() -> None:
    good = compare_scores({"loss": 0.5, "accuracy": 0.9}, {"loss": 0.50001, "accuracy": 0.91}, 100, 4, EXACT)
    assert good.passed and "on 100 samples in 4 batches" in good.reason
    assert not compare_scores({"loss": 0.5}, {"loss": 0.51}, 100, 4, EXACT).passed
    bad = compare_scores({"loss": 0.1, "accuracy": 0.978}, {"loss": 3.0, "accuracy": 0.056}, 360, 4, EXACT)
    assert not bad.passed and "accuracy 0.056 and 0.978" in bad.reason
    assert not compare_scores({"loss": 0.5}, {"loss": float("nan")}, 100, 4, EXACT).passed
    assert compare_scores({"loss": float("nan")}, {"loss": float("inf")}, 100, 4, EXACT).passed
    assert compare_scores({"loss": 0.5}, {"loss": 0.507}, 100, 4, tolerance(True, False)).passed


def test_a_model_of_bfloat16_is_known_as_such() -> None:
    _, found = captured()
    assert not computes_in_halves(found.graph)
    half = capture(
        nn.Linear(FEATURES, CLASSES).bfloat16(),
        F.cross_entropy,
        {},
        [(inputs.bfloat16(), targets) for inputs, targets in batches([8, 5])],
    )
    assert computes_in_halves(half.graph)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.randn(x.shape[0], CLASSES)


def test_a_model_that_draws_in_evaluation_is_known_as_such() -> None:
    dropping = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))
    assert not draws_in_evaluation(capture(dropping, F.cross_entropy, {}, batches([8, 5])).graph)
    assert draws_in_evaluation(capture(Noisy(), F.cross_entropy, {}, batches([8, 5])).graph)


def test_the_sample_is_of_the_last_evaluation_random_and_bounded() -> None:
    witness = Witness()
    tensors = {"inputs": torch.zeros(8, 4)}
    witness.begin("eval_data")
    for number in range(1, 401):
        witness.fed(EvalBatch(-number, tensors, 8))
        witness.came(-number, "leaf", {"loss": 1.0})
    numbers = {-each.batch.microbatch for each in witness.current}
    assert len(numbers) == 64 and max(numbers) > 128, "not the first alone"
    witness.trained(7, tensors, 8)
    assert witness.current == [] and len(witness.training_batches) == 1
    # Of batches of 60 MB there is room for one.
    witness.begin("eval_data")
    large = {"inputs": torch.zeros(1).expand(60 << 18)}
    for number in range(1, 9):
        witness.fed(EvalBatch(-number, large, 8))
        witness.came(-number, "leaf", {"loss": 1.0})
    assert len(witness.current) == 1


def test_a_batch_is_shortened_in_all_values_that_have_its_size() -> None:
    tensors = {"x": torch.zeros(8, 3), "y": torch.zeros(8), "table": torch.zeros(5, 2)}
    short = shortened(tensors, {"x": ("s0", 3), "y": ("s0",), "table": (5, 2)}, 2)
    assert [tuple(t.shape) for t in short.values()] == [(2, 3), (2,), (5, 2)]
    assert shortened(tensors, {"x": (8, 3), "y": (8,), "table": (5, 2)}, 2) is tensors
