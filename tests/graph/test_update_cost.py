"""The cost of an update is measured, with separate figures for its number of parameters and their size."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ravnest.engine.speed.update_time import measure_coding, measure_copy, measure_correction, measure_update
from ravnest.engine.weights.versions import WeightVersions
from ravnest.graph.update_cost import Shape, StepMeasurement, UpdateCost, time_update
from ravnest.spec import OptimizerSpec


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_every_part_of_an_update_costs_something(name: str) -> None:
    cost = time_update(OptimizerSpec(name, {"lr": 0.01}), 1, measure_update, measure_copy)
    assert cost.byte_seconds > 0 and cost.copy_byte_seconds >= 0 and cost.step_seconds + cost.parameter_seconds > 0
    # No optimizer takes a second for a megabyte, or a tenth of a second for nothing.
    assert cost.byte_seconds * 1e6 < 1 and cost.step_seconds + cost.parameter_seconds < 0.1


def test_an_update_for_several_microbatches_costs_each_of_them_its_part() -> None:
    seconds = {1: 3e-6, 9: 11e-6}

    def measured(optimizer: OptimizerSpec, shapes: Sequence[Shape]) -> StepMeasurement:
        size = sum(4 * rows * columns for rows, columns in shapes)
        return StepMeasurement(3e-6 + size * 1e-9 if shapes[0][0] > 8 else seconds[len(shapes)], size, size)

    once, shared = (time_update(OptimizerSpec("SGD"), n, measured, lambda: 2e-9) for n in (1, 4))
    approx = pytest.approx
    whole = UpdateCost(approx(2e-6), approx(1e-6), approx(1e-9), approx(2e-9), state_bytes_per_byte=approx(1.0))
    assert once == whole
    quarter = UpdateCost(approx(0.5e-6), approx(0.25e-6), approx(0.25e-9), approx(0.5e-9))
    assert shared == replace(quarter, state_bytes_per_byte=approx(1.0))


@pytest.mark.parametrize(("cubic_seconds", "largest"), [(1e-12, 2048), (1e-9, 512), (1e-6, 256)])
def test_a_slow_optimizer_is_measured_on_affordable_parameters_alone(cubic_seconds: float, largest: int) -> None:
    sides = []

    def measured(optimizer: OptimizerSpec, shapes: Sequence[Shape]) -> StepMeasurement:
        sides.append(shapes[0][0])
        return StepMeasurement(cubic_seconds * sides[-1] ** 3, 4 * sides[-1] ** 2, 0)

    found = time_update(OptimizerSpec("Muon"), 1, measured, lambda: 0.0)
    assert found.byte_seconds == pytest.approx(cubic_seconds * largest / 4, rel=1e-3)
    assert max(sides) == largest


@pytest.mark.parametrize(
    ("name", "options", "state"),
    [
        ("SGD", {}, 0.0),
        ("SGD", {"momentum": 0.9}, 1.0),
        ("AdamW", {}, 2.0),
        ("AdamW", {"amsgrad": True}, 3.0),
        ("Adagrad", {}, 1.0),
    ],
)
def test_the_memory_of_the_optimizers_state_is_known(name: str, options: dict[str, object], state: float) -> None:
    measured = measure_update(OptimizerSpec(name, {"lr": 0.01, **options}), [(700, 800)])
    assert measured.state_bytes / measured.size_bytes == state


def test_an_update_of_weights_in_use_moves_them_first() -> None:
    cost = UpdateCost(1.0, 0.5, 0.25, copy_byte_seconds=0.125)
    assert cost.seconds(4, 8) == 1.0 + 2.0 + 2.0
    assert cost.seconds(4, 8, held=True) == cost.seconds(4, 8) + 1.0
    assert cost.scaled(2.0) == UpdateCost(2.0, 1.0, 0.5, copy_byte_seconds=0.125)


def test_the_state_is_measured_as_it_is_between_steps() -> None:
    packed = measure_update(OptimizerSpec("AdamW", {"lr": 0.01}), [(256, 256)], moments="8bit")
    assert packed.state_bytes == pytest.approx(2 * (1 + 4 / 256) * 256 * 256)
    small = measure_update(OptimizerSpec("AdamW", {"lr": 0.01}), [(8, 8)], moments="8bit")
    assert small.state_bytes == 2 * 4 * 64


def test_coding_and_stale_gradients_take_time_for_each_byte() -> None:
    optimizer = OptimizerSpec("AdamW", {"lr": 0.01})
    assert measure_coding() > 0
    assert measure_correction(optimizer, "float32", "none") == pytest.approx(0.0, abs=2e-9)
    assert measure_correction(optimizer, "float32", "predict") >= 0
    cost = time_update(optimizer, 2, measure_update, lambda: 2e-9, lambda: 4e-9, lambda: 6e-9)
    assert (cost.copy_byte_seconds, cost.code_byte_seconds, cost.stale_byte_seconds) == (1e-9, 2e-9, 3e-9)


@pytest.mark.parametrize("held", [False, True])
def test_the_copy_of_a_version_that_is_kept_is_part_of_the_measured_time(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    renew, copied = WeightVersions.renew, []

    def watched(versions: WeightVersions, name: str, memory: torch.Tensor | None = None) -> torch.Tensor | None:
        before = renew(versions, name, memory)
        copied.append(before is not None)
        return before

    monkeypatch.setattr(WeightVersions, "renew", watched)
    measured = measure_update(OptimizerSpec("AdamW", {"lr": 0.01}), [(64, 64), (8, 8)], held=held)
    assert measured.seconds > 0 and copied and set(copied) == {held}
