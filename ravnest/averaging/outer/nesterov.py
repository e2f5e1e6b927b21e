"""Nesterov momentum on the mean difference, as in DiLoCo: rounds that agree on a direction go further along it.

DiLoCo's own values, 0.7 and 0.9, are for rounds after hundreds of updates. Rounds here come after a few tens, and with
them those values end higher than the plain mean: see benchmarks/RESULTS.md, convergence.
"""

import math
from typing import Final

import torch
from torch import Tensor

RATE: Final = 1.0
MOMENTUM: Final = 0.5
"""For four clusters."""

_PART_VALUES: Final = 1 << 18


def momentum_for(clusters: int) -> float:
    """With which momentum so many clusters average, where nobody says.

    A steady difference is multiplied with 1 / (1 - momentum) in the end: here with the root of their number. So much
    less noise there is in a mean of so many, and so much further it bears to go.
    """
    return 1 - 1 / math.sqrt(clusters)


class Nesterov:
    """v = momentum * v + d; step = rate * (d + momentum * v)."""

    name = "nesterov"
    keeps_state = True

    def __init__(self, rate: float = RATE, momentum: float = MOMENTUM) -> None:
        self.rate = rate
        self.momentum = momentum
        self.state: Tensor | None = None
        """The velocity v; None before the first step, which is the same as zeros."""

    def step(self, difference: Tensor) -> Tensor:
        if self.state is None:
            self.state = torch.zeros_like(difference)
        self.state.mul_(self.momentum).add_(difference)
        # A product and a sum, each rounded by itself: in one operation some machines round once, others twice, and all
        # members must get the same bits.
        for start in range(0, difference.numel(), _PART_VALUES):
            part = slice(start, start + _PART_VALUES)
            difference[part].add_(self.state[part] * self.momentum)
        return difference.mul_(self.rate)
