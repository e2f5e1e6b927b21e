"""Interface of the outer optimizers, and their construction by name."""

from typing import Final, Protocol

from torch import Tensor

from ravnest.averaging.outer.mean import Mean
from ravnest.averaging.outer.nesterov import MOMENTUM, RATE, Nesterov
from ravnest.errors import RavnestError

OUTERS: Final = ("mean", "nesterov")


class Outer(Protocol):
    """Turns the mean difference of a ring's members into the step that all of them take.

    Each member computes the step itself. The input is the same to the bit at all members and the arithmetic is
    elementwise float32, so the step is the same too.
    """

    state: Tensor | None
    """Memory between rounds, of the length of the difference; None before the first step or without any memory."""

    name: str
    keeps_state: bool
    """Whether `state` is ever anything but None."""

    def step(self, difference: Tensor) -> Tensor:
        """The step for a mean difference, computed in the difference's memory. Call it once per committed round, since
        it changes `state`."""


def outer_named(name: str, rate: float | None = None, momentum: float | None = None) -> Outer:
    """A new outer optimizer; None stands for its default. RavnestError for an unknown name or a setting it lacks."""
    if name == "mean":
        if momentum is not None:
            raise RavnestError("the outer optimizer 'mean' has no momentum; leave it out or use 'nesterov'")
        return Mean(1.0 if rate is None else rate)
    if name == "nesterov":
        return Nesterov(RATE if rate is None else rate, MOMENTUM if momentum is None else momentum)
    raise RavnestError(f"there is no outer optimizer {name!r}; use one of {', '.join(OUTERS)}")
