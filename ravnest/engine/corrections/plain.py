"""Correction "none": the optimizer unchanged, at any staleness."""

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.weights.blocks import Block


class Plain:
    """Steps the optimizer, and nothing else."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def predicts(self) -> bool:
        return False

    def forward_weights(self) -> dict[str, Tensor] | None:
        return None

    def moved(self) -> None:
        pass

    def begin_update(self, staleness: float, version: int) -> None:
        pass

    def step(self, block: Block) -> None:
        block.step()

    def end_update(self, predicted: dict[str, Tensor] | None) -> None:
        pass
