"""What an update costs on this machine: the optimizer's step, measured on parameters made for that alone.

A stage's update grows with the number of its parameters and with their size; both are told apart here, so that the
cost of a stage is known for every way of cutting the model, without a copy of it.
"""

import math
from dataclasses import dataclass, replace

import torch

from ravnest.graph.clock import work_clock
from ravnest.spec import OptimizerSpec

_REPETITIONS = 5
_SMALL = (8, 8)
_MANY = 9
_SIDES = (256, 512, 1024, 2048)
"""Of the square whose step tells what each byte costs. The last is large enough that it and the optimizer's state do
not fit into a processor's cache, as those of a real model."""
_AFFORDABLE_SECONDS = 0.2
"""For one step: a square of twice the side is not tried where its step might take longer."""
_GROWTH = 8
"""Times as long a step takes at most on a square of twice the side: Muon multiplies matrices, in bfloat16, at a few
billion operations a second where a processor has no instructions for that. 2048 would take it minutes there."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """One update costs so much, and so much more for each parameter and each byte of them."""

    step_seconds: float = 0.0
    parameter_seconds: float = 0.0
    byte_seconds: float = 0.0
    copy_byte_seconds: float = 0.0
    """More for each byte where a microbatch in flight holds the weights: they move to fresh memory first, in every
    stage but a leaf."""
    state_bytes_per_byte: float = 0.0
    """Memory that the optimizer keeps for a byte of parameters: Adam 2, SGD 0, with momentum 1."""

    def seconds(self, parameters: int, size_bytes: int, *, held: bool = False) -> float:
        """Of an update of so many parameters that take so many bytes together; `held` where versions are kept."""
        byte = self.byte_seconds + held * self.copy_byte_seconds
        return self.step_seconds + parameters * self.parameter_seconds + size_bytes * byte

    def scaled(self, factor: float) -> "UpdateCost":
        """The optimizer's step so many times as long."""
        return replace(
            self,
            step_seconds=factor * self.step_seconds,
            parameter_seconds=factor * self.parameter_seconds,
            byte_seconds=factor * self.byte_seconds,
        )


def time_update(optimizer: OptimizerSpec, accumulate: int = 1) -> UpdateCost:
    """The cost of this optimizer's updates for each microbatch, where every `accumulate` of them make one."""
    one, many = (_found(optimizer, shapes) for shapes in ([_SMALL], [_SMALL] * _MANY))
    large = _large(optimizer)
    parameter = max(0.0, (many.step - one.step) / (_MANY - 1))
    return UpdateCost(
        step_seconds=max(0.0, one.step - parameter) / accumulate,
        parameter_seconds=parameter / accumulate,
        byte_seconds=max(0.0, large.step - one.step) / large.size_bytes / accumulate,
        copy_byte_seconds=_copy_byte_seconds() / accumulate,
        state_bytes_per_byte=large.state_bytes / large.size_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    step: float
    size_bytes: int
    state_bytes: int


def _large(optimizer: OptimizerSpec) -> _Found:
    """Of the largest square that can be afforded."""
    found = None
    for side in _SIDES:
        if found is not None and _GROWTH * found.step > _AFFORDABLE_SECONDS:
            break
        found = _found(optimizer, [(side, side)])
    assert found is not None
    return found


def _found(optimizer: OptimizerSpec, shapes: list[tuple[int, int]]) -> _Found:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    made = optimizer.build(parameters)
    step = math.inf
    clock = work_clock()
    for _ in range(_REPETITIONS):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        start = clock()
        made.step()
        step = min(step, clock() - start)
    # A counter of steps is not of the parameter's size.
    kept = [value for state in made.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    states = sum(value.nbytes for value in kept if value.numel() > 1)
    return _Found(step, sum(parameter.nbytes for parameter in parameters), states)


def _copy_byte_seconds() -> float:
    weights = torch.ones(_SIDES[-1], _SIDES[-1])
    seconds = math.inf
    # Versions are held while the next one is made: each gets memory that nobody has had yet.
    versions = []
    clock = work_clock()
    for _ in range(_REPETITIONS):
        start = clock()
        versions.append(weights.clone())
        seconds = min(seconds, clock() - start)
    return seconds / weights.nbytes
