"""What an update costs on this machine: the optimizer's step, measured on parameters made for that alone.

A stage's update grows with the number of its parameters and with their size; both are told apart here, so that the
cost of a stage is known for every way of cutting the model, without a copy of it.
"""

import time
from dataclasses import dataclass

import torch

from ravnest.spec import OptimizerSpec

_REPETITIONS = 5
_SMALL = (8, 8)
_MANY = 9
_LARGE = (2048, 2048)
"""Large enough that it and the optimizer's state do not fit into a processor's cache, as those of a real model."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """One update costs so much, and so much more for each parameter and each byte of them."""

    step_seconds: float = 0.0
    parameter_seconds: float = 0.0
    byte_seconds: float = 0.0
    state_bytes_per_byte: float = 2.0
    """What the optimizer keeps for a parameter, against the parameter itself: Adam's two moments, say."""


def time_update(optimizer: OptimizerSpec, accumulate: int = 1) -> UpdateCost:
    """The cost of this optimizer's updates for each microbatch, where every `accumulate` of them make one."""
    one, many, large = (_seconds(optimizer, shapes) for shapes in ([_SMALL], [_SMALL] * _MANY, [_LARGE]))
    parameter = max(0.0, (many - one) / (_MANY - 1))
    byte = max(0.0, large - one) / (_LARGE[0] * _LARGE[1] * torch.float32.itemsize)
    return UpdateCost(max(0.0, one - parameter) / accumulate, parameter / accumulate, byte / accumulate)


def _seconds(optimizer: OptimizerSpec, shapes: list[tuple[int, int]]) -> float:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    made = optimizer.build(parameters)
    best = float("inf")
    for _ in range(_REPETITIONS):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        start = time.perf_counter()
        made.step()
        best = min(best, time.perf_counter() - start)
    return best
