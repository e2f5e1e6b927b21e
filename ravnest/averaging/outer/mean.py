"""Plain mean, as in the paper: every member's parameters become the weighted mean."""

from torch import Tensor


class Mean:
    """Steps by the mean difference times a rate, which is 1 by default."""

    name = "mean"
    keeps_state = False
    state: Tensor | None = None

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate

    def step(self, difference: Tensor) -> Tensor:
        return difference if self.rate == 1.0 else difference.mul_(self.rate)
