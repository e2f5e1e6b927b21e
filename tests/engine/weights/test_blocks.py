"""Parameters that are stepped in blocks, large ones in parts, equal torch's own step bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ravnest.engine.weights.blocks import Blocks
from ravnest.spec import OptimizerSpec

_BLOCK_BYTES = 4 * 64
_SIZES = {"small": (3,), "odd": (7, 143), "large": (40, 64), "untouched": (500,), "bias": (5,)}

_OPTIMIZERS = [
    OptimizerSpec("SGD", {"lr": 0.1}),
    OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    OptimizerSpec("SGD", {"lr": 0.1, "weight_decay": 0.01, "fused": True}),
    OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    OptimizerSpec("Adam", {"lr": 0.01}),
    OptimizerSpec("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    OptimizerSpec("Adam", {"lr": 0.01, "foreach": True}),
    OptimizerSpec("AdamW", {"lr": 0.01}),
    OptimizerSpec("AdamW", {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    OptimizerSpec("AdamW", {"lr": 0.01, "fused": True, "maximize": True}),
    OptimizerSpec("Adam", {"lr": 0.01, "fused": True, "amsgrad": True, "weight_decay": 0.1}),
    *(OptimizerSpec(name, {"lr": 0.01}) for name in ("NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD")),
    *(OptimizerSpec(name, {"lr": 0.01}) for name in ("Adagrad", "Adadelta", "Adafactor")),
    OptimizerSpec("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    OptimizerSpec("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.5, "fused": True}),
]


def made(spec: OptimizerSpec) -> tuple[dict[str, nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(3)
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in _SIZES.items()}
    return parameters, spec.build(parameters.values())


def set_gradients(parameters: dict[str, nn.Parameter], update: int) -> None:
    generator = torch.Generator().manual_seed(update)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator)
        # One parameter never has a gradient, one has its first gradient late.
        parameter.grad = None if name == "untouched" or (name == "odd" and update == 0) else gradient


@torch.no_grad()
def step_blocks(blocks: Blocks) -> int:
    count = 0
    for group in blocks.groups:
        for block in blocks.of(group):
            block.step()
            count += 1
    return count


@pytest.mark.parametrize("spec", _OPTIMIZERS, ids=lambda spec: "-".join([spec.name, *map(str, spec.arguments)]))
def test_steps_in_blocks_are_bitwise_those_of_the_whole_optimizer(spec: OptimizerSpec) -> None:
    theirs, whole = made(spec)
    ours, stepped = made(spec)
    blocks = Blocks(stepped, ours, _BLOCK_BYTES)
    for update in range(4):
        set_gradients(theirs, update)
        set_gradients(ours, update)
        whole.step()
        assert (step_blocks(blocks) > len(_SIZES)) == (spec.name != "Adafactor")
        for name, parameter in theirs.items():
            assert torch.equal(parameter, ours[name]), (update, name)
            assert_equal_states(whole.state.get(parameter, {}), stepped.state.get(ours[name], {}))
    assert whole.state_dict()["param_groups"] == stepped.state_dict()["param_groups"]


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.shape == other[name].shape and value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def test_a_parameter_that_is_not_contiguous_is_stepped_as_a_whole() -> None:
    spec = OptimizerSpec("AdamW", {"lr": 0.01})
    stepped = []
    for block_bytes in (1 << 20, _BLOCK_BYTES):
        values = torch.linspace(-1, 1, 4096).view(64, 64).t()
        parameter = nn.Parameter(values.clone(memory_format=torch.preserve_format))
        assert not parameter.is_contiguous()
        blocks = Blocks(spec.build([parameter]), {"w": parameter}, block_bytes)
        for _ in range(3):
            parameter.grad = torch.ones(64, 64)
            assert step_blocks(blocks) == 1
        stepped.append(parameter)
    assert torch.equal(*stepped)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, optimizer = made(OptimizerSpec("RMSprop", {"lr": 0.01}))
    set_gradients(parameters, 1)
    own, state = optimizer.param_groups[0]["params"], optimizer.state

    def failing() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optimizer, "step", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        step_blocks(Blocks(optimizer, parameters, _BLOCK_BYTES))
    assert optimizer.param_groups[0]["params"] is own and optimizer.state is state


def test_small_parameters_share_a_block_and_the_largest_come_last() -> None:
    parameters = {f"p{size}": torch.zeros(size) for size in (50, 1, 7, 20, 3)}
    blocks = partial(Blocks, OptimizerSpec("SGD", {"lr": 0.1}).build(parameters.values()))
    assert blocks(parameters, 4 * 12).groups == [("p1", "p3", "p7"), ("p20",), ("p50",)]
    assert blocks(parameters).groups == [("p1", "p3", "p7", "p20", "p50")]
    assert blocks({}).groups == []
    assert [len(block.parameters[0]) for block in blocks(parameters, 4 * 12).of(("p50",))] == [12, 12, 12, 12, 2]
