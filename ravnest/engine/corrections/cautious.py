"""Correction "cautious": foresight with a discounted learning rate during the first updates.

The step and the prediction are those of foresight.py, both with the learning rate of discount.py. The two complement
each other: predictions over many updates are inaccurate early in training, when gradients change direction quickly, and
that is when the discount reduces the harm of staleness. The prediction remains after the discount has ended.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import discount, foresight
from ravnest.engine.corrections.foresight import Foresight
from ravnest.engine.weights.blocks import Ahead, Block


class Cautious(Foresight):
    """Steps and predicts like `Foresight`, at the learning rate of `Discount`."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, Tensor], warm_up_updates: int = discount.WARM_UP_UPDATES
    ) -> None:
        super().__init__(optimizer, parameters)
        self._discount = discount.Discount(optimizer, warm_up_updates)

    def forward_weights(self) -> dict[str, Tensor] | None:
        # The updates until the gradient arrives have the current discount too.
        with self._discount.applied():
            return super().forward_weights()

    def begin_update(self, staleness: float, version: int) -> None:
        self._discount.begin_update(staleness, version)
        super().begin_update(staleness, version)

    def step(self, block: Block) -> None:
        if block.ahead is not None:
            block.ahead = Ahead(block.ahead.weights, self._discount.discounted(block.ahead.options))
        with self._discount.applied():
            super().step(block)


def refusal(optimizer: Optimizer) -> str | None:
    return foresight.refusal(optimizer) or discount.refusal(optimizer)
