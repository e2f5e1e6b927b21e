"""Cost of an update on this machine: the time of the optimizer's step, measured on parameters made for this purpose.

The time depends on the number of a stage's parameters and on their size. Both are measured separately, so that the cost
of a stage is known for every way of cutting the model, without a copy of the model.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from ravnest.graph.clock import work_clock
from ravnest.spec import OptimizerSpec

_REPETITIONS = 5
_SMALL = (8, 8)
_MANY = 9
_SIDES = (256, 512, 1024, 2048)
"""Sides of the square parameters whose steps give the cost of a byte. The largest and its optimizer state do not fit
into a processor's cache, like those of a real model."""
_AFFORDABLE_SECONDS = 0.2
"""Maximum time of one step: the next larger square is not measured if its step might take longer."""
_GROWTH = 8
"""Maximum factor between the steps of two successive squares. Muon multiplies matrices in bfloat16; a processor without
instructions for bfloat16 computes a few billion operations per second, and would take minutes for the largest."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Cost of one update: a fixed time, a time for each parameter, and a time for each byte of parameters."""

    step_seconds: float = 0.0
    parameter_seconds: float = 0.0
    byte_seconds: float = 0.0
    copy_byte_seconds: float = 0.0
    """Additional time for each byte if a microbatch in flight still uses the weights, so that the update has to copy
    them first. This is so in every stage but a leaf."""
    state_bytes_per_byte: float = 0.0
    """Bytes of optimizer state for each byte of parameters: 2 for Adam, 0 for SGD, 1 for SGD with momentum."""

    def seconds(self, parameters: int, size_bytes: int, *, held: bool = False) -> float:
        """Time of an update of this many parameters with this total size; `held` if older versions are kept."""
        byte = self.byte_seconds + held * self.copy_byte_seconds
        return self.step_seconds + parameters * self.parameter_seconds + size_bytes * byte

    def scaled(self, factor: float) -> "UpdateCost":
        """The same cost with the optimizer's step `factor` times as long."""
        return replace(
            self,
            step_seconds=factor * self.step_seconds,
            parameter_seconds=factor * self.parameter_seconds,
            byte_seconds=factor * self.byte_seconds,
        )


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Time of one step of an optimizer, and the sizes of its parameters and of its state."""

    seconds: float
    size_bytes: int
    state_bytes: int


Shape = tuple[int, int]
StepTimer = Callable[[OptimizerSpec, Sequence[Shape]], StepMeasurement]


Around = Callable[[Optimizer, Sequence[torch.Tensor]], AbstractContextManager[None]]
"""Context of a step of an optimizer of these parameters."""


def measure_step(
    optimizer: OptimizerSpec, shapes: Sequence[Shape], around: Around = lambda *_: nullcontext()
) -> StepMeasurement:
    """The fastest of several steps of the optimizer on new parameters of these shapes, each within `around`."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    built = optimizer.build(parameters)
    seconds = math.inf
    clock = work_clock()
    for _ in range(_REPETITIONS):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        start = clock()
        with around(built, parameters):
            built.step()
        seconds = min(seconds, clock() - start)
    state_bytes = sum(_growing_bytes(value) for state in built.state.values() for value in state.values())
    return StepMeasurement(seconds, sum(parameter.nbytes for parameter in parameters), state_bytes)


def _growing_bytes(value: object) -> int:
    """The size of an entry of an optimizer's state; 0 for a scalar, such as a counter of steps, which does not grow
    with the parameter."""
    if isinstance(value, torch.Tensor) and value.numel() <= 1:
        return 0
    return int(getattr(value, "nbytes", 0))


def measure_copy() -> float:
    """Seconds per byte of a copy of weights into new memory."""
    weights = torch.ones(_SIDES[-1], _SIDES[-1])
    seconds = math.inf
    # All copies are kept, so that each one gets memory that was not used before.
    versions = []
    clock = work_clock()
    for _ in range(_REPETITIONS):
        start = clock()
        versions.append(weights.clone())
        seconds = min(seconds, clock() - start)
    return seconds / weights.nbytes


def time_update(
    optimizer: OptimizerSpec,
    accumulate: int = 1,
    step_timer: StepTimer = measure_step,
    copy_timer: Callable[[], float] = measure_copy,
) -> UpdateCost:
    """The cost of this optimizer's updates per microbatch, with one update for every `accumulate` microbatches."""
    one, many = (step_timer(optimizer, shapes) for shapes in ([_SMALL], [_SMALL] * _MANY))
    large = _measure_large(optimizer, step_timer)
    parameter = max(0.0, (many.seconds - one.seconds) / (_MANY - 1))
    return UpdateCost(
        step_seconds=max(0.0, one.seconds - parameter) / accumulate,
        parameter_seconds=parameter / accumulate,
        byte_seconds=max(0.0, large.seconds - one.seconds) / large.size_bytes / accumulate,
        copy_byte_seconds=copy_timer() / accumulate,
        state_bytes_per_byte=large.state_bytes / large.size_bytes,
    )


def _measure_large(optimizer: OptimizerSpec, step_timer: StepTimer) -> StepMeasurement:
    """The measurement of the largest square that is affordable."""
    measured = step_timer(optimizer, [(_SIDES[0], _SIDES[0])])
    for side in _SIDES[1:]:
        if _GROWTH * measured.seconds > _AFFORDABLE_SECONDS:
            break
        measured = step_timer(optimizer, [(side, side)])
    return measured
