"""Predicted weights and Nesterov's step together: forwards look ahead over the whole staleness, with a momentum that
makes what is ahead predictable.

Nesterov's gradient is that of the point where the weights will be when it is applied. For a stale gradient that is as
many updates ahead as it is stale (predict.py), and a prediction over several updates holds the better the less a single
gradient can turn them: hence the momentum grows with staleness (nesterov.py), less than without a prediction.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import nesterov, predict

GROWTH: Final = 0.15
"""How fast the momentum grows: 1 - g = (1 - b) / (1 + GROWTH * staleness)."""


class Foresight:
    """Steps as `Nesterov` and predicts as `Predict`."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._step = nesterov.Nesterov(optimizer, GROWTH)
        self._ahead = predict.Predict(optimizer, parameters)

    def forward_weights(self) -> dict[str, Tensor] | None:
        return self._ahead.forward_weights()

    def moved(self) -> None:
        self._ahead.moved()

    def begin_update(self, staleness: float, version: int) -> None:
        self._step.begin_update(staleness, version)
        self._ahead.begin_update(staleness, version)

    def step(self) -> None:
        self._step.step()


def refusal(optimizer: Optimizer) -> str | None:
    return predict.refusal(optimizer) or nesterov.refusal(optimizer)
