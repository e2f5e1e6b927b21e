"""Correction "predict": forwards use the weights predicted for the time at which their gradients are applied.

As in SpecTrain (Chen et al., 2018) and XPipe (Guan et al., 2019), the prediction assumes as many updates as the
gradients are stale, each with the optimizer's current velocity. Predicted weights are never saved, averaged or
evaluated.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.nesterov import PRODUCT
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.buckets import foreach_buckets
from ravnest.engine.weights.packed_moments import unpacked_state

_ADAMS: Final = ("Adam", "AdamW", "NAdam")


class Predict(Plain):
    """Steps the optimizer unchanged, and predicts the weights for forwards."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(optimizer)
        self._parameters = parameters
        self._staleness = ExpectedStaleness()
        self._predicted: dict[str, Tensor] | None = None
        """Shared by all forwards until the next update."""

    def forward_weights(self) -> dict[str, Tensor] | None:
        if self._staleness.value and self._predicted is None:
            self._predicted = self._predict(self._staleness.value)
        return self._predicted

    def moved(self) -> None:
        self._predicted = None

    def begin_update(self, staleness: float, version: int) -> None:
        self._staleness.add(staleness)
        self._predicted = None

    @torch.no_grad()
    def _predict(self, staleness: float) -> dict[str, Tensor]:
        [group] = self._optimizer.param_groups
        # A parameter that never had a gradient does not move, but must not share memory with the master.
        known = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
        found = {name: p.detach().clone() for name, p in self._parameters.items() if not _moves(known[name])}
        moving = [(name, p.detach()) for name, p in self._parameters.items() if name not in found]
        for bucket in foreach_buckets(moving, lambda each: each[1]):
            names, weights = [name for name, _ in bucket], [weight for _, weight in bucket]
            states = [unpacked_state(known[name]) for name in names]
            moved = _moved(self._optimizer, group, weights, states, staleness * group["lr"])
            found.update(zip(names, moved, strict=True))
        return {name: found[name].requires_grad_() for name in self._parameters}


def refusal(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if name == "SGD" and not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum keeps no velocity to predict weights from"
    if name not in (*_ADAMS, "SGD"):
        return f"the updates of {name} cannot be predicted; predict works with {', '.join(_ADAMS)} and SGD"
    return None


def _moves(state: Mapping[str, Any]) -> bool:
    return "exp_avg" in state or state.get("momentum_buffer") is not None


def _moved(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    weights: list[Tensor],
    states: Sequence[Mapping[str, Any]],
    far: float,
) -> Sequence[Tensor]:
    """The weights after updates with the last velocity; `far` is the sum of their learning rates."""
    if type(optimizer).__name__ == "SGD":
        momenta = [state["momentum_buffer"] for state in states]
        return torch._foreach_add(weights, momenta, alpha=far if group["maximize"] else -far)
    beta1, beta2 = group["betas"]
    steps = [float(state["step"]) for state in states]
    # The product of all momenta, for the bias correction of the mean; the momentum may have changed over time.
    left = [
        float(state.get("mu_product", state.get(PRODUCT, beta1**count)))
        for state, count in zip(states, steps, strict=True)
    ]
    scales = torch._foreach_sqrt([state.get("max_exp_avg_sq", state["exp_avg_sq"]) for state in states])
    torch._foreach_div_(scales, [math.sqrt(1 - beta2**count) for count in steps])
    torch._foreach_add_(scales, group["eps"])
    return torch._foreach_addcdiv(
        weights, [state["exp_avg"] for state in states], scales, [-far / (1 - each) for each in left]
    )
