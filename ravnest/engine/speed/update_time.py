"""Time of updates on this machine: those that a stage makes, measured on parameters made for this purpose."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from ravnest.engine.corrections.plain import Plain
from ravnest.engine.update_pass import UpdatePass
from ravnest.engine.weights.gradient_sum import GradientSum
from ravnest.engine.weights.packed_moments import moments_in
from ravnest.engine.weights.versions import WeightVersions
from ravnest.graph.clock import work_clock
from ravnest.graph.update_cost import Shape, StepMeasurement
from ravnest.spec import OptimizerSpec

_REPETITIONS: Final = 5
_LARGE: Final = (2048, 2048)
"""Shape of a parameter that does not fit into a processor's cache."""
_SIMPLE: Final = OptimizerSpec("SGD", {"lr": 0.0})


def measure_update(
    optimizer: OptimizerSpec, shapes: Sequence[Shape], *, held: bool = False, moments: str = "float32"
) -> StepMeasurement:
    """The fastest of several updates of new parameters of these shapes, with moments in this form; with `held`, each
    keeps the version before."""
    versions = WeightVersions({str(number): torch.ones(shape) for number, shape in enumerate(shapes)})
    built = optimizer.build(list(versions.masters.values()))
    update, correction = UpdatePass(versions, built, moments=moments_in(moments, built)), Plain(built)
    seconds = math.inf
    clock = work_clock()
    for _ in range(_REPETITIONS):
        gradients = GradientSum()
        ones = {name: torch.ones_like(master.detach()) for name, master in versions.masters.items()}
        gradients.add(ones, versions.current.number)
        before = versions.acquire() if held else None
        start = clock()
        update.run(gradients, correction, {})
        seconds = min(seconds, clock() - start)
        if before is not None:
            versions.release(before)
    state_bytes = sum(_growing_bytes(value) for state in built.state.values() for value in state.values())
    return StepMeasurement(seconds, sum(master.nbytes for master in versions.masters.values()), state_bytes)


def _growing_bytes(value: object) -> int:
    """The size of an entry of an optimizer's state; 0 for a scalar, such as a counter of steps, which does not grow
    with the parameter."""
    if isinstance(value, torch.Tensor) and value.numel() <= 1:
        return 0
    return int(getattr(value, "nbytes", 0))


def measure_copy() -> float:
    """Additional seconds per byte of an update that keeps the version before."""
    alone, held = (measure_update(_SIMPLE, [_LARGE], held=held) for held in (False, True))
    return max(0.0, held.seconds - alone.seconds) / held.size_bytes
