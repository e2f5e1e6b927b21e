"""Mixed precision: close to float32, the same types between stages, and no microbatch lost to an overflow."""

from typing import Any

import pytest
import torch

from ravnest.engine.passes.precision import FIRST_SCALE, GROWS_AFTER, Precision
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec
from tests.engine.stages import stages_of
from tests.models import ZOO

CPU = torch.device("cpu")
SGD = OptimizerSpec("SGD", {"lr": 0.02})


@pytest.fixture(scope="module", params=["cnn", "gpt_tied", "hf_gpt2", "hf_llama", "hf_bert", "gru", "unet", "in_place"])
def model(request: pytest.FixtureRequest) -> tuple[Captured, list[Any]]:
    made = ZOO[request.param].make()
    return capture(made.model, made.loss, made.metrics, made.batches[:2]), made.batches[:3]


def trained(model: tuple[Captured, list[Any]], precision: str) -> list[float]:
    """The losses of a few updates through two stages."""
    found, batches = model
    graph = found.graph
    places = [p for p, crossing in sorted(layout(graph).crossing.items()) if crossing]
    middle = places[len(places) // 2]
    stages = stages_of(found, split(graph, (middle,)), SGD, precision=precision)
    losses = []
    for number, batch in enumerate(batches):
        values: dict[str, Any] = dict(found.structure.flatten(batch))
        leaf = stages[-1]
        if leaf.graph.lookups:
            values |= leaf.look_up(number, values)
        for stage in stages:
            wanted = [v.name for v in (*stage.graph.inputs, *stage.graph.from_stages)]
            values |= stage.forward(number, {name: values[name] for name in wanted})
            for spec in stage.graph.sends:
                assert spec.dtype is None or values[spec.name].dtype == spec.dtype
        losses.append(float(values[str(stages[-1].graph.loss)]))
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(number, gradients)
            assert all(g.dtype == torch.float32 for g in gradients.values())
            if stage is not leaf:
                stage.update(number)
        if leaf.graph.lookups:
            leaf.add_row_gradients(number, gradients or {})
        leaf.update(number)
    return losses


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_trains_close_to_float32_with_the_types_that_stages_expect(
    model: tuple[Captured, list[Any]], precision: str
) -> None:
    exact, mixed = trained(model, "float32"), trained(model, precision)
    assert mixed == pytest.approx(exact, rel=0.05, abs=0.05)
    assert mixed != exact, "something was computed in fewer bits"


def a_product(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and a float16 product with it whose gradient is proportional to `scale`."""
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        return weight, (torch.full((4, 4), scale) @ weight).float()


def test_a_backward_that_overflows_is_repeated_with_a_smaller_scale() -> None:
    precision = Precision("float16", CPU)
    weight, product = a_product(100.0)
    (found,) = precision.gradients([product], [weight], [torch.ones(4, 4)])
    torch.testing.assert_close(found, torch.full((4, 4), 400.0))
    assert 1 < precision.scale < FIRST_SCALE


def test_small_gradients_do_not_vanish() -> None:
    weight, product = a_product(1e-3)
    small = torch.full((4, 4), 1e-6)
    (vanished,) = torch.autograd.grad([product], [weight], [small], retain_graph=True)
    (found,) = Precision("float16", CPU).gradients([product], [weight], [small])
    assert found is not None
    torch.testing.assert_close(found, torch.full((4, 4), 4e-9), rtol=1e-2, atol=0)
    assert not torch.allclose(vanished, found, rtol=1e-2, atol=0), "this would show nothing otherwise"


def test_a_gradient_that_is_not_finite_without_a_scale_is_returned() -> None:
    precision = Precision("float16", CPU)
    weight, product = a_product(1.0)
    (found,) = precision.gradients([product], [weight], [torch.full((4, 4), float("inf"))])
    assert found is not None and not torch.isfinite(found).all()


def test_the_scale_grows_after_many_backwards_without_an_overflow() -> None:
    precision = Precision("float16", CPU)
    weight = torch.ones(1, requires_grad=True)
    for _ in range(GROWS_AFTER):
        precision.gradients([weight * 1.0], [weight], [torch.ones(1)])
    assert precision.scale == 2 * FIRST_SCALE


def test_float32_and_bfloat16_scale_nothing() -> None:
    assert [Precision(name, CPU).scale for name in ("float32", "bfloat16", "float16")] == [1, 1, FIRST_SCALE]
