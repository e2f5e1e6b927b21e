"""Foresight with short steps in the beginning: predictions and stale gradients are worst while the weights change most.

The step and the prediction are those of foresight.py, both with the learning rate that discount.py lowers over the
first updates. Each makes up for what the other leaves: a prediction over many updates is far off while every gradient
points elsewhere, which is early in training; and once the discount is lifted, the prediction goes on.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import discount, foresight


class Cautious:
    """Steps and predicts as `Foresight`, at the rate of `Discount`."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, Tensor], warm_up_updates: int = discount.WARM_UP_UPDATES
    ) -> None:
        self._foresight = foresight.Foresight(optimizer, parameters)
        self._discount = discount.Discount(optimizer, warm_up_updates)

    def forward_weights(self) -> dict[str, Tensor] | None:
        # The updates until the gradient comes are as short as those of now.
        with self._discount.applied():
            return self._foresight.forward_weights()

    def moved(self) -> None:
        self._foresight.moved()

    def begin_update(self, staleness: float, version: int) -> None:
        self._discount.begin_update(staleness, version)
        self._foresight.begin_update(staleness, version)

    def step(self) -> None:
        with self._discount.applied():
            self._foresight.step()


def refusal(optimizer: Optimizer) -> str | None:
    return foresight.refusal(optimizer) or discount.refusal(optimizer)
