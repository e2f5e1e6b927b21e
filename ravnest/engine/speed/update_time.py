"""Time of updates on this machine: those that a stage makes, measured on parameters made for this purpose."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from ravnest.engine.corrections.correction import correction_named
from ravnest.engine.passes.saved_weights import CODEC
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
    optimizer: OptimizerSpec,
    shapes: Sequence[Shape],
    *,
    held: bool = False,
    moments: str = "float32",
    correction: str = "none",
) -> StepMeasurement:
    """The fastest of several updates of new parameters of these shapes, with moments in this form. With `held`, each
    keeps the version before; with a `correction`, its gradients are one update old."""
    versions = WeightVersions({str(number): torch.ones(shape) for number, shape in enumerate(shapes)})
    built = optimizer.build(list(versions.masters.values()))
    update = UpdatePass(versions, built, moments=moments_in(moments, built))
    corrected = correction_named(correction, built, versions.masters)
    [group] = built.param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    stale = 0 if correction == "none" else 1
    seconds = math.inf
    clock = work_clock()
    for _ in range(_REPETITIONS):
        gradients = GradientSum()
        ones = {name: torch.ones_like(master.detach()) for name, master in versions.masters.items()}
        gradients.add(ones, versions.current.number - stale)
        before = versions.acquire() if held else None
        start = clock()
        update.run(gradients, corrected, options)
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


def measure_coding() -> float:
    """Seconds per byte of weights that are coded in 8 bits once and read once."""
    weights = torch.randn(math.prod(_LARGE))
    seconds = math.inf
    clock = work_clock()
    for _ in range(_REPETITIONS):
        start = clock()
        CODEC.decode(CODEC.encode(weights), weights.numel())
        seconds = min(seconds, clock() - start)
    return seconds / weights.nbytes


def measure_correction(optimizer: OptimizerSpec, moments: str, correction: str) -> float:
    """Additional seconds per byte of an update whose gradients are stale, with this correction."""
    plain, stale = (
        measure_update(optimizer, [_LARGE], moments=moments, correction=each) for each in ("none", correction)
    )
    return max(0.0, stale.seconds - plain.seconds) / stale.size_bytes
