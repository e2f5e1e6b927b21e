"""An update in blocks equals the update of whole parameters, and microbatches in flight keep their weights."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.corrections.plain import Plain
from ravnest.engine.stage import Stage
from ravnest.engine.update_pass import UpdatePass
from ravnest.engine.weights.gradient_sum import GradientSum
from ravnest.engine.weights.versions import WeightVersions
from ravnest.graph.capture.capture import Captured, capture
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import stages_of

_ADAMW = OptimizerSpec("AdamW", {"lr": 0.01})
_SGD = OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {}, batches([8, 5]))


def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.engine.weights.blocks.BLOCK_BYTES", 4 * 64)


def trained(
    captured: Captured, optimizer: OptimizerSpec, ahead: int, updates: int = 6, **settings: object
) -> tuple[Stage, list[float]]:
    """A stage after some updates with this many microbatches in flight, and its losses."""
    [stage] = stages_of(captured, [captured.graph], optimizer, **settings)
    data = [captured.structure.flatten(batch) for batch in batches([8] * 4)]
    losses = []
    count = updates * stage.settings.accumulate
    for number in range(count + ahead):
        if number < count:
            losses.append(float(stage.forward(number, data[number % 4])[str(stage.graph.loss)]))
        if number >= ahead:
            stage.backward(number - ahead, None)
            stage.update(number - ahead)
    return stage, losses


def assert_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("optimizer", [_ADAMW, _SGD, OptimizerSpec("NAdam"), OptimizerSpec("Adagrad")], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 0.1}, {"clip_value": 0.01, "accumulate": 3}, {"clip_norm": 0.1, "accumulate": 3}],
    ids=str,
)
def test_an_update_in_parts_is_bitwise_that_of_whole_parameters(
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    optimizer: OptimizerSpec,
    correction: str,
    ahead: int,
) -> None:
    whole, losses = trained(captured, optimizer, ahead, correction=correction, **settings)
    in_small_blocks(monkeypatch)
    parts, others = trained(captured, optimizer, ahead, correction=correction, **settings)
    # The losses come from predicted weights.
    assert losses == others
    assert_equal(whole.state()[0], parts.state()[0])
    assert whole.state()[1] == parts.state()[1]


@pytest.mark.parametrize("correction", ["none", "nesterov", "cautious"])
def test_weights_in_flight_do_not_change_while_the_stage_is_updated(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, correction: str
) -> None:
    in_small_blocks(monkeypatch)
    stage, _ = trained(captured, _ADAMW, 2, correction=correction)
    data = captured.structure.flatten(batches([8])[0])
    held = []
    for number in range(100, 108):
        predicted = stage.correction.forward_weights()
        used = predicted or {spec.name: stage.state_tensors()[f"param:{spec.key}"] for spec in stage.graph.parameters}
        held.append((used, {name: tensor.detach().clone() for name, tensor in used.items()}))
        stage.forward(number, data)
        if number >= 102:
            stage.backward(number - 2, None)
            # The weights of the microbatches that are still in flight.
            stage.update(number - 2)
            for tensors, copies in held[-2:]:
                assert_equal({name: tensor.detach() for name, tensor in tensors.items()}, copies)
    assert (stage.correction.forward_weights() is None) == (correction != "cautious")


@pytest.mark.parametrize("correction", ["predict", "foresight", "cautious"])
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (_ADAMW, ScheduleSpec("StepLR", {"step_size": 1, "gamma": 0.5})),
        (_SGD, ScheduleSpec("OneCycleLR", {"max_lr": 0.1, "total_steps": 20})),
        (OptimizerSpec("NAdam"), ScheduleSpec("CosineAnnealingLR", {"T_max": 10})),
    ],
    ids=lambda spec: spec.name,
)
@pytest.mark.filterwarnings("error")
def test_weights_are_predicted_with_the_learning_rate_that_follows_the_update(
    captured: Captured, optimizer: OptimizerSpec, schedule: ScheduleSpec, correction: str
) -> None:
    stage, _ = trained(captured, optimizer, 3, correction=correction, schedule=schedule.to_json())
    with_the_update = stage.correction.forward_weights()
    stage.correction.moved()
    later = stage.correction.forward_weights()
    assert with_the_update is not None and later is not None and with_the_update is not later
    assert_equal(with_the_update, later)


def test_a_schedule_sees_the_same_learning_rates_as_in_a_plain_loop(captured: Captured) -> None:
    schedule = ScheduleSpec("StepLR", {"step_size": 2, "gamma": 0.5})
    stage, _ = trained(captured, OptimizerSpec("SGD", {"lr": 1e-3}), 0, updates=5, schedule=schedule.to_json())
    assert stage.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.25)
    net = a_net()
    plain = torch.optim.SGD(net.parameters(), lr=1e-3)
    steps = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for inputs, targets in (batches([8] * 4) * 2)[:5]:
        plain.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        plain.step()
        steps.step()
    states = stage.state_tensors()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(states[f"param:{name}"], parameter.detach(), rtol=1e-6, atol=1e-7)


def test_an_update_without_parameters_makes_the_next_version() -> None:
    versions, optimizer = WeightVersions({}), _ADAMW.build([])
    gradients = GradientSum()
    gradients.add({}, 0)
    UpdatePass(versions, optimizer, clip_norm=1.0).run(gradients, Plain(optimizer), {})
    assert versions.current.number == 1
