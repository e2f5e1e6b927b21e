"""A forward uses the weights as they are expected to be when its gradients are applied.

As in SpecTrain (Chen et al., 2018) and XPipe (Guan et al., 2019): until then as many updates follow as gradients are
stale, each of about the optimizer's present velocity. Weights that are saved, averaged and evaluated are never the
predicted ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.nesterov import PRODUCT
from ravnest.engine.weights.buckets import batches

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

    @torch.no_grad()
    def _predict(self, staleness: float) -> dict[str, Tensor]:
        [group] = self._optimizer.param_groups
        # A parameter that has never had a gradient does not move, and must not share memory with the master.
        known = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
        found = {name: p.detach().clone() for name, p in self._parameters.items() if not _moves(known[name])}
        moving = [(name, p.detach()) for name, p in self._parameters.items() if name not in found]
        for batch in batches(moving, lambda each: each[1]):
            names, weights = [name for name, _ in batch], [weight for _, weight in batch]
            moved = _moved(self._optimizer, group, weights, [known[name] for name in names], staleness * group["lr"])
            found.update(zip(names, moved, strict=True))
        return {name: found[name].requires_grad_() for name in self._parameters}


def refusal(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if name == "SGD" and not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum keeps no velocity to predict weights from"
    if name not in (*_ADAMS, "SGD"):
        return f"how {name} will move the weights is not known; predict works with {', '.join(_ADAMS)} and SGD"
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
    """The weights after updates of about the last velocity, at learning rates that are `far` together."""
    if type(optimizer).__name__ == "SGD":
        momenta = [state["momentum_buffer"] for state in states]
        return torch._foreach_add(weights, momenta, alpha=far if group["maximize"] else -far)
    beta1, beta2 = group["betas"]
    steps = [float(state["step"]) for state in states]
    # What is missing of the mean, where the momentum was not always the same.
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
