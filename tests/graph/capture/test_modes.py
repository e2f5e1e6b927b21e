"""Modules train in the mode the user left them in, and everything is as it was afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.errors import CaptureError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.capture.fingerprint import Fingerprint
from ravnest.graph.capture.modes import left_as_it_was
from ravnest.graph.cutting.layout import layout
from tests.graph.cutting import run
from tests.odd_models import ThreeLayers

Tensor = torch.Tensor


class Normed(ThreeLayers):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.later = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.later(self.drop(self.norm(self.a(x)))))


def test_a_frozen_batch_norm_keeps_its_statistics_and_a_frozen_dropout_drops_nothing() -> None:
    model = Normed()
    model.norm.eval()
    model.drop.eval()
    found = _captured(model)
    assert {s.key.split(".")[0] for s in found.graph.states} == {"later"}
    assert found.frozen_modules == ("norm", "drop")
    batch = (torch.randn(6, 8), torch.randn(6, 8))
    # The captured weights share the model's memory, so the graph runs before the model updates its statistics.
    outcomes = [run(found, places, batch) for places in ([], *([cut] for cut in layout(found.graph).cuts))]
    F.mse_loss(model(batch[0]), batch[1]).backward()
    for have in outcomes:
        for name, gradient in have.gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-6, atol=1e-8)
        assert torch.equal(have.states["later.running_var"], model.later.running_var)


@pytest.mark.parametrize(
    ("prepare", "frozen"),
    [
        (lambda model: model, ()),
        (lambda model: model.eval(), ()),
        (lambda model: (model.eval(), model.c.train()), ()),  # a new head of a model from a hub
        (lambda model: model.later.eval(), ("later",)),
    ],
)
def test_a_model_that_is_in_evaluation_as_a_whole_is_trained(
    prepare: Callable[[Any], Any], frozen: tuple[str, ...]
) -> None:
    model = Normed()
    prepare(model)
    modes = [module.training for module in model.modules()]
    assert _captured(model).frozen_modules == frozen
    assert [module.training for module in model.modules()] == modes


def test_a_model_in_evaluation_with_a_part_that_trains_is_refused() -> None:
    model = Normed().eval()
    model.drop.train()
    with pytest.raises(CaptureError, match=r"in eval\(\), but its module drop is in train\(\).*call model.train\(\)"):
        _captured(model)


def test_a_model_whose_train_freezes_a_part_is_taken_at_its_word() -> None:
    class Freezes(Normed):
        def train(self, mode: bool = True) -> "Freezes":
            super().train(mode)
            self.norm.eval()
            return self

    found = _captured(Freezes())
    assert found.frozen_modules == ("norm",)
    assert {s.key.split(".")[0] for s in found.graph.states} == {"later"}


def test_attributes_that_a_forward_sets_are_as_before() -> None:
    class Counts(ThreeLayers):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x
            self.seen.add_(1)
            return self.rest(self.a(x))

    model = Counts()
    seen = model.seen
    with left_as_it_was(model):
        model(torch.randn(2, 8))
    assert model.calls == 0 and not hasattr(model, "last")
    assert model.seen is seen and torch.equal(seen, torch.zeros(2))


def test_gradients_that_were_there_before_are_there_after() -> None:
    model = Normed()
    model(torch.randn(6, 8)).sum().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: None if g is None else g.clone() for name, g in before.items()}
    _captured(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        copied = copies[name]
        assert copied is None or (parameter.grad is not None and torch.equal(parameter.grad, copied))


@pytest.mark.parametrize("size", [1000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprints_tell_how_far_two_tensors_are_apart(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(size).to(dtype)
    change = 0.1 * torch.randn(size)
    b = (a.float() + change).to(dtype)
    wanted = float((b.float() - a.float()).norm())
    first, second = Fingerprint.of(a), Fingerprint.of(b)
    assert first.distance(second) == pytest.approx(wanted, rel=0.05)
    assert first.distance(Fingerprint.of(a.clone())) == 0.0
    assert first.distance(Fingerprint.of(-a)) == pytest.approx(2 * first.norm, rel=0.05)
    assert first.values.numel() <= 1_200_000


def _captured(model: nn.Module) -> Captured:
    torch.manual_seed(0)
    batches = [(torch.randn(size, 8), torch.randn(size, 8)) for size in (6, 5)]
    return capture(model, F.mse_loss, {}, batches)
