"""Nesterov momentum on the mean difference, as in DiLoCo: rounds that agree on a direction go further along it.

DiLoCo's rate 0.7 and momentum 0.9 are meant for rounds that are hundreds of updates apart. Rounds here are a few tens
of updates apart, and with DiLoCo's values they end at a higher loss than the plain mean: see benchmarks/RESULTS.md,
convergence.
"""

import math
from typing import Final

import torch
from torch import Tensor

RATE: Final = 1.0
MOMENTUM: Final = 0.5
"""The default, which suits four clusters; see `momentum_for`."""

_PART_VALUES: Final = 1 << 18


def momentum_for(clusters: int) -> float:
    """The default momentum for this number of clusters.

    In the long run, a constant difference is multiplied by 1 / (1 - momentum). This momentum makes that factor the
    square root of the number of clusters, because a mean over n clusters has sqrt(n) times less noise.
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
        # Two operations instead of a fused multiply-add: whether that rounds once or twice depends on the machine, and
        # all members must get the same bits.
        for start in range(0, difference.numel(), _PART_VALUES):
            part = slice(start, start + _PART_VALUES)
            difference[part].add_(self.state[part] * self.momentum)
        return difference.mul_(self.rate)
