"""Cost of an update on a machine, from the times of updates of a few sizes (engine/speed/update_time.py).

The time depends on the number of a stage's parameters and on their size. Both are measured separately, so that the cost
of a stage is known for every way of cutting the model, without a copy of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ravnest.spec import OptimizerSpec

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
    code_byte_seconds: float = 0.0
    """The same if the weights are kept in 8 bits: the time to code them, and to read them in the backward."""
    stale_byte_seconds: float = 0.0
    """Additional time for each byte if the gradients are stale: the correction of staleness, and the prediction of the
    weights for the next forward. This is so in every stage but a leaf."""
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
    """Time of one update, and the sizes of its parameters and of the optimizer's state."""

    seconds: float
    size_bytes: int
    state_bytes: int


Shape = tuple[int, int]
StepTimer = Callable[[OptimizerSpec, Sequence[Shape]], StepMeasurement]


def time_update(
    optimizer: OptimizerSpec,
    accumulate: int,
    step_timer: StepTimer,
    copy_timer: Callable[[], float],
    code_timer: Callable[[], float] = lambda: 0.0,
    stale_timer: Callable[[], float] = lambda: 0.0,
) -> UpdateCost:
    """The cost of this optimizer's updates per microbatch, with one update for every `accumulate` microbatches.

    `step_timer` times an update of parameters of these shapes. The others time what a byte adds: `copy_timer` of a
    version that is kept, `code_timer` of one in 8 bits, `stale_timer` of parameters with stale gradients.
    """
    one, many = (step_timer(optimizer, shapes) for shapes in ([_SMALL], [_SMALL] * _MANY))
    large = _measure_large(optimizer, step_timer)
    parameter = max(0.0, (many.seconds - one.seconds) / (_MANY - 1))
    return UpdateCost(
        step_seconds=max(0.0, one.seconds - parameter) / accumulate,
        parameter_seconds=parameter / accumulate,
        byte_seconds=max(0.0, large.seconds - one.seconds) / large.size_bytes / accumulate,
        copy_byte_seconds=copy_timer() / accumulate,
        code_byte_seconds=code_timer() / accumulate,
        stale_byte_seconds=stale_timer() / accumulate,
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
