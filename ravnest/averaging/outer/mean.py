"""The plain mean, as in the paper: all take the mean of what they learned."""

from torch import Tensor


class Mean:
    """Steps by the mean difference, times a rate that is 1 unless asked otherwise."""

    name = "mean"
    keeps_state = False
    state: Tensor | None = None

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate

    def step(self, difference: Tensor) -> Tensor:
        return difference if self.rate == 1.0 else difference.mul_(self.rate)
