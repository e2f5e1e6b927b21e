"""Correction "none": the optimizer unchanged, at any staleness."""

from torch import Tensor
from torch.optim import Optimizer


class Plain:
    """Steps the optimizer, and nothing else."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def forward_weights(self) -> dict[str, Tensor] | None:
        return None

    def moved(self) -> None:
        pass

    def begin_update(self, staleness: float, version: int) -> None:
        pass

    def step(self) -> None:
        self._optimizer.step()
