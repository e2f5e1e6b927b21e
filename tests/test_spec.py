"""Optimizers and schedules travel as names and plain values, and nothing else gets through."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ravnest import GraphError
from ravnest.spec import OptimizerSpec, ScheduleSpec, optimizer_refusal, split_partial

OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adafactor"])
def test_an_optimizer_survives_the_wire_and_updates_parameters(name: str) -> None:
    spec = OptimizerSpec.from_json(OptimizerSpec(name, {"lr": 0.5}).to_json())
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = spec.build([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert type(optimizer) is getattr(torch.optim, name)
    assert not torch.equal(parameter, torch.ones(3, 2))


def test_a_specification_is_read_back_equal() -> None:
    spec = OptimizerSpec("AdamW", {"lr": 1e-3, "betas": (0.9, 0.95), "fused": None, "amsgrad": True})
    assert OptimizerSpec.from_json(spec.to_json()) == spec
    schedule = ScheduleSpec("MultiStepLR", {"milestones": (10, 20), "gamma": 0.5})
    assert ScheduleSpec.from_json(schedule.to_json()) == schedule


def test_a_built_schedule_changes_the_learning_rate_at_each_step() -> None:
    optimizer = OptimizerSpec("SGD", {"lr": 1.0}).build([nn.Parameter(torch.zeros(1))])
    schedule = ScheduleSpec.from_json('{"name": "StepLR", "arguments": {"step_size": 1, "gamma": 0.5}}').build(
        optimizer
    )
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "name",
    [
        "LBFGS",
        "SparseAdam",
        "Optimizer",
        "swa_utils",
        "lr_scheduler",
        "__builtins__",
        "os.system",
        "Any",
        "",
        "adam",
        "StepLR",
    ],
)
def test_a_provider_refuses_an_optimizer_that_is_not_on_the_list(name: str) -> None:
    with pytest.raises(GraphError):
        OptimizerSpec.from_json(json.dumps({"name": name, "arguments": {}}))
    with pytest.raises(GraphError):
        OptimizerSpec(name).build([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    "name", ["LambdaLR", "SequentialLR", "ReduceLROnPlateau", "SWALR", "LRScheduler", "SGD", "warnings"]
)
def test_a_provider_refuses_a_schedule_that_is_not_on_the_list(name: str) -> None:
    with pytest.raises(GraphError):
        ScheduleSpec.from_json(json.dumps({"name": name, "arguments": {}}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        '"SGD"',
        '{"name": "SGD"}',
        '{"name": "SGD", "arguments": [], "more": 1}',
        '{"name": "SGD", "arguments": [1]}',
        '{"name": 3, "arguments": {}}',
        '{"name": "SGD", "arguments": {"lr": {"a": 1}}}',
        '{"name": "SGD", "arguments": {"lr": ["a"]}}',
        '{"name": "SGD", "arguments": {"lr": NaN}}',
        '{"name": "SGD", "arguments": {"lr": Infinity}}',
        '{"name": "SGD", "arguments": {"lr": 1' + "0" * 400 + "}}",
        '{"name": "SGD", "arguments": {"lr": "fast"}}',
        '{"name": "SGD", "arguments": {"lr": -1}}',
        '{"name": "SGD", "arguments": {"rate": 1}}',
        '{"name": "SGD", "arguments": {"params": null}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_malformed_specification_is_refused(text: str | bytes) -> None:
    with pytest.raises(GraphError):
        OptimizerSpec.from_json(text)


def test_arguments_that_fail_only_at_a_step_are_refused() -> None:
    assert "differentiable" in str(optimizer_refusal(OptimizerSpec("SGD", {"differentiable": True})))
    assert optimizer_refusal(OptimizerSpec("SGD", {"lr": 0.1})) is None


def test_a_schedule_that_does_not_fit_its_optimizer_is_refused_when_built() -> None:
    optimizer = OptimizerSpec("Adagrad").build([nn.Parameter(torch.zeros(1))])
    cyclic = ScheduleSpec.from_json('{"name": "CyclicLR", "arguments": {"base_lr": 0.1, "max_lr": 1}}')
    with pytest.raises(GraphError, match="CyclicLR cannot be built"):
        cyclic.build(optimizer)


def test_a_subclass_of_a_torch_optimizer_is_not_taken_for_it() -> None:
    class SGD(torch.optim.SGD):
        pass

    refusal = split_partial("optimizer", partial(SGD, lr=0.1))
    assert isinstance(refusal, str)
    assert "providers never run" in refusal


def test_lists_become_tuples_on_both_sides() -> None:
    parts = split_partial("schedule", partial(lr_scheduler.MultiStepLR, milestones=[3, 5]))
    assert parts == ("MultiStepLR", {"milestones": (3, 5)})
