"""What an outer optimizer is, and all of them by name."""

from typing import Final, Protocol

from torch import Tensor

from ravnest.averaging.outer.mean import Mean
from ravnest.averaging.outer.nesterov import MOMENTUM, RATE, Nesterov
from ravnest.errors import RavnestError

OUTERS: Final = ("mean", "nesterov")


class Outer(Protocol):
    """Turns the mean difference of a ring's members into the step that all of them take.

    Every member computes it for itself, from bit for bit the same input with elementwise float32 arithmetic: all get
    the same step.
    """

    state: Tensor | None
    """What it remembers between rounds, as long as the difference; None: nothing (yet)."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_state(self) -> bool:
        """Whether `state` is ever anything but None."""
        ...

    def step(self, difference: Tensor) -> Tensor:
        """The step for a mean difference, whose memory it takes over. Changes `state`: once for a committed round."""
        ...


def outer_named(name: str, rate: float | None = None, momentum: float | None = None) -> Outer:
    """A fresh outer optimizer; None stands for its default. RavnestError: no such name, or a value it cannot use."""
    if name == "mean":
        if momentum is not None:
            raise RavnestError("the outer optimizer 'mean' has no momentum; leave it out or use 'nesterov'")
        return Mean(1.0 if rate is None else rate)
    if name == "nesterov":
        return Nesterov(RATE if rate is None else rate, MOMENTUM if momentum is None else momentum)
    raise RavnestError(f"there is no outer optimizer {name!r}; use one of {', '.join(OUTERS)}")
