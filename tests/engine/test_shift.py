"""Changes of a stage by averaging: values change, versions and microbatches in flight do not."""

import json

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.stage import Stage
from ravnest.engine.weights.moments import moment_names
from ravnest.graph.capture.capture import capture
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import stages_of

ADAM = OptimizerSpec("Adam", {"lr": 0.01})


def a_stage(
    schedule: ScheduleSpec | None = None, net: torch.nn.Module | None = None
) -> tuple[Stage, dict[str, torch.Tensor]]:
    captured = capture(net or a_net(), F.cross_entropy, {}, batches([8, 5]))
    told = None if schedule is None else schedule.to_json()
    return stages_of(captured, [captured.graph], ADAM, schedule=told)[0], dict(captured.sample)


def step(stage: Stage, sample: dict[str, torch.Tensor], number: int, updates: int = 0) -> None:
    stage.forward(number, sample)
    stage.backward(number, None)
    stage.update(number, flush=True, updates=updates)


def test_a_shift_is_no_update_and_keeps_the_updates_since() -> None:
    stage, sample = a_stage()
    step(stage, sample, 0)
    before = {name: tensor.clone() for name, tensor in stage.state_tensors().items()}
    step(stage, sample, 1)
    moved = {name: tensor - before[name] for name, tensor in stage.state_tensors().items() if name.startswith("param:")}
    stage.shift({name: torch.full_like(change, 2.0) for name, change in moved.items()})
    after = stage.state_tensors()
    assert stage.version == 2
    for name, change in moved.items():
        torch.testing.assert_close(after[name], before[name] + change + 2)


def test_a_shift_does_not_affect_the_backward_of_a_microbatch_in_flight() -> None:
    stage, sample = a_stage()
    reference, _ = a_stage()
    for each in (stage, reference):
        each.forward(0, sample)
    stage.shift({name: torch.ones_like(t) for name, t in stage.state_tensors().items() if name.startswith("param:")})
    for each in (stage, reference):
        each.backward(0, None)
        each.update(0)
    shifted, plain = stage.state_tensors(), reference.state_tensors()
    for name, tensor in plain.items():
        torch.testing.assert_close(shifted[name], tensor + 1 if name.startswith("param:") else tensor)


def test_given_values_are_set_bit_for_bit() -> None:
    stage, _ = a_stage()
    name = next(name for name in stage.state_tensors() if name.startswith("param:"))
    wanted = torch.randn_like(stage.state_tensors()[name])
    stage.shift({name: torch.zeros_like(wanted)}, {name: wanted})
    assert torch.equal(stage.state_tensors()[name], wanted)


def test_moments_are_shifted_and_clamped_to_zero() -> None:
    stage, sample = a_stage()
    name = next(name for name in stage.state_tensors() if name.startswith("param:")).removeprefix("param:")
    first, second = f"optim:{name}:exp_avg", f"optim:{name}:exp_avg_sq"
    stage.shift({second: torch.tensor(-1.0)})
    assert second not in stage.state_tensors(), "there is nothing to shift before the first update"
    step(stage, sample, 0)
    shape = stage.state_tensors()[first].shape
    stage.shift({first: -torch.ones(shape), second: -torch.ones(shape)}, None, {second})
    assert (stage.state_tensors()[first] < 0).all()
    assert (stage.state_tensors()[second] == 0).all()


def test_counters_are_shifted_as_whole_numbers() -> None:
    features = batches([8])[0][0].shape[1]
    stage, sample = a_stage(net=torch.nn.Sequential(torch.nn.Linear(features, 6), torch.nn.BatchNorm1d(6)))
    counters = [name for name, tensor in stage.state_tensors().items() if tensor.dtype == torch.int64]
    assert counters, "the model has a batch norm that counts its batches"
    step(stage, sample, 0)
    stage.shift({name: torch.tensor(5) for name in counters})
    assert [int(stage.state_tensors()[name]) for name in counters] == [6] * len(counters)


def test_the_schedule_follows_the_updates_of_the_whole_run() -> None:
    schedule = ScheduleSpec("StepLR", {"step_size": 1, "gamma": 0.5})
    stage, sample = a_stage(schedule)
    rates = []
    for number, updates in enumerate((1, 4, 4, 0)):
        step(stage, sample, number, updates)
        rates.append(json.loads(stage.state()[1]["optimizer"])["groups"][0]["lr"] / 0.01)
    assert rates == pytest.approx([2**-1, 2**-4, 2**-5, 2**-6])


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (ADAM, ("exp_avg", "exp_avg_sq")),
        (OptimizerSpec("SGD", {"lr": 0.1}), ()),
        (OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9}), ("momentum_buffer",)),
    ],
)
def test_moment_names_follow_from_the_optimizer(spec: OptimizerSpec, names: tuple[str, ...]) -> None:
    assert moment_names(spec) == names
