"""Correction "foresight": predicted weights together with Nesterov's step.

Nesterov's gradient is taken at the point where the weights will be when it is applied. For a stale gradient this point
is as many updates ahead as the gradient is stale (predict.py). A prediction over several updates is more accurate the
less a single gradient can change their direction, so the momentum grows with staleness (nesterov.py), but less than
without a prediction.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import nesterov, predict
from ravnest.engine.weights.blocks import Block

GROWTH: Final = 0.15
"""Growth of the momentum with staleness: 1 - g = (1 - b) / (1 + GROWTH * staleness)."""


class Foresight(nesterov.NesterovCorrection):
    """Steps like `NesterovCorrection` and predicts like `Predict`."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(optimizer, GROWTH)
        self._ahead = predict.Predict(optimizer, parameters)

    @property
    def predicts(self) -> bool:
        return self._ahead.predicts

    def forward_weights(self) -> dict[str, Tensor] | None:
        return self._ahead.forward_weights()

    def moved(self) -> None:
        self._ahead.moved()

    def begin_update(self, staleness: float, version: int) -> None:
        super().begin_update(staleness, version)
        self._ahead.begin_update(staleness, version)

    def step(self, block: Block) -> None:
        scales = self._step(block)
        if block.ahead is not None:
            self._ahead.write(block, block.ahead, scales)

    def end_update(self, predicted: dict[str, Tensor] | None) -> None:
        self._ahead.end_update(predicted)


def refusal(optimizer: Optimizer) -> str | None:
    return predict.refusal(optimizer) or nesterov.refusal(optimizer)
