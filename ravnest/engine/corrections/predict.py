"""A forward uses the weights as they are expected to be when its gradients are applied.

As in SpecTrain (Chen et al., 2018) and XPipe (Guan et al., 2019): until then as many updates follow as gradients are
stale, each of about the optimizer's present velocity. Weights that are saved, averaged and evaluated are never the
predicted ones.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.nesterov import PRODUCT

_ADAMS: Final = ("Adam", "AdamW", "NAdam")


class Predict:
    """Steps the optimizer as it is, and predicts the weights for forwards."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._staleness = ExpectedStaleness()
        self._predicted: dict[str, Tensor] | None = None
        """For all forwards until the next update: they share the memory."""

    def forward_weights(self) -> dict[str, Tensor] | None:
        if self._staleness.value and self._predicted is None:
            self._predicted = self._predict(self._staleness.value)
        return self._predicted

    def moved(self) -> None:
        self._predicted = None

    def begin_update(self, staleness: float, version: int) -> None:
        self._staleness.measured(staleness)
        self._predicted = None

    def step(self) -> None:
        self._optimizer.step()

    def _predict(self, staleness: float) -> dict[str, Tensor]:
        [group] = self._optimizer.param_groups
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                velocity = _velocity(self._optimizer, group, self._optimizer.state.get(parameter, {}))
                now = parameter.detach()
                # A parameter that has never had a gradient does not move, and must not share memory with the master.
                moved = now.clone() if velocity is None else now.sub(velocity, alpha=staleness * group["lr"])
                found[name] = moved.requires_grad_()
        return found


def refusal(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if name == "SGD" and not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum keeps no velocity to predict weights from"
    if name not in (*_ADAMS, "SGD"):
        return f"how {name} will move the weights is not known; predict works with {', '.join(_ADAMS)} and SGD"
    return None


def _velocity(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    """What the last step took from the weights for each unit of the learning rate, about; None before the first."""
    if type(optimizer).__name__ == "SGD":
        momentum: Tensor | None = state.get("momentum_buffer")
        return momentum if momentum is None or not group["maximize"] else -momentum
    if "exp_avg" not in state:
        return None
    steps = float(state["step"])
    beta1, beta2 = group["betas"]
    # What is missing of the mean, where the momentum was not always the same.
    left = float(state.get("mu_product", state.get(PRODUCT, beta1**steps)))
    squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    scale = (squares.sqrt() / math.sqrt(1 - beta2**steps)).add_(group["eps"]).mul_(1 - left)
    return torch.div(state["exp_avg"], scale)
