"""The cost of an update is measured, and told apart by what it grows with."""

import pytest

from ravnest.graph.update_cost import UpdateCost, time_update
from ravnest.spec import OptimizerSpec


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_every_part_of_an_update_costs_something(name: str) -> None:
    cost = time_update(OptimizerSpec(name, {"lr": 0.01}))
    assert cost.byte_seconds > 0 and cost.step_seconds + cost.parameter_seconds > 0
    # Nobody's optimizer takes a second for a megabyte, or a tenth of one for nothing.
    assert cost.byte_seconds * 1e6 < 1 and cost.step_seconds + cost.parameter_seconds < 0.1


def test_an_update_for_several_microbatches_costs_each_of_them_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 3e-6, 9: 11e-6}
    large = 3e-6 + 2048 * 2048 * 4 * 1e-9
    monkeypatch.setattr(
        "ravnest.graph.update_cost._seconds",
        lambda optimizer, shapes: large if shapes == [(2048, 2048)] else seconds[len(shapes)],
    )
    once, shared = (time_update(OptimizerSpec("SGD"), accumulate) for accumulate in (1, 4))
    assert once == UpdateCost(pytest.approx(2e-6), pytest.approx(1e-6), pytest.approx(1e-9))
    assert shared == UpdateCost(pytest.approx(0.5e-6), pytest.approx(0.25e-6), pytest.approx(0.25e-9))
