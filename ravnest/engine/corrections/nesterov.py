"""Correction "nesterov": Nesterov's step with a momentum that grows with staleness.

After Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (2025): with a momentum near 1,
Nesterov's look-ahead compensates for the delay, because the direction hardly changes while a gradient is in flight, and
the stale gradient itself has a weight of only 1 - momentum. In the form of NAdam the parameters are already the
look-ahead point, so forwards use the current weights.

The momentum g of a stage follows from the momentum b of the job's optimizer and the measured staleness s:
1 - g = (1 - b) / (1 + s), with g at most MAX_MOMENTUM. Without staleness g = b, and the step is the optimizer's own.
With b = 0.9 and 7 updates of staleness g is 0.9875, about the paper's value for 8 stages.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.buckets import foreach_buckets

MAX_MOMENTUM: Final = 0.99
PRODUCT: Final = "momentum_product"
"""Key in the optimizer's state of a parameter: the product of all momenta so far, used for the bias correction of the
mean. It is saved with the rest of the state."""


class NesterovCorrection(Plain):
    """Steps Adam, AdamW and NAdam as NAdam, and SGD with Nesterov's momentum, with the momentum for the staleness."""

    def __init__(self, optimizer: Optimizer, growth: float = 1.0) -> None:
        """`growth`: factor of the staleness in the formula of the momentum."""
        super().__init__(optimizer)
        self._growth = growth
        self._staleness = ExpectedStaleness()

    def begin_update(self, staleness: float, version: int) -> None:
        self._staleness.add(staleness)

    def step(self) -> None:
        staleness = self._growth * self._staleness.value
        if not staleness:
            self._optimizer.step()
            return
        [group] = self._optimizer.param_groups
        if isinstance(self._optimizer, SGD):
            _step_sgd(self._optimizer, group, staleness)
        elif isinstance(self._optimizer, NAdam):
            _step_nadam(self._optimizer, group, staleness)
        else:
            _step_adam(self._optimizer, group, staleness)


def momentum(own: float, staleness: float) -> float:
    """The momentum at this staleness if the optimizer's own is `own`."""
    return max(own, min(MAX_MOMENTUM, 1 - (1 - own) / (1 + staleness)))


def refusal(optimizer: Optimizer) -> str | None:
    if type(optimizer) in (Adam, AdamW, NAdam):
        return None
    if type(optimizer) is not SGD:
        return f"{type(optimizer).__name__} has no form with Nesterov's step; it works with Adam, AdamW, NAdam and SGD"
    if not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum has no direction to look ahead in"
    return None


def _step_sgd(optimizer: Optimizer, group: dict[str, Any], staleness: float) -> None:
    own, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
    group["momentum"] = momentum(own, staleness)
    # A mean over more gradients, each with a lower weight: the sum of the weights is that of the job's momentum. Torch
    # supports Nesterov's step only without dampening.
    factor = (1 - dampening) * (1 - group["momentum"]) / (1 - own)
    group["dampening"], group["nesterov"] = 0, True
    for parameter in group["params"]:
        if parameter.grad is not None:
            if group["weight_decay"]:
                # Weight decay is part of the gradient and is scaled with it.
                parameter.grad.add_(
                    parameter.detach(), alpha=-group["weight_decay"] if group["maximize"] else group["weight_decay"]
                )
            parameter.grad.mul_(factor)
    decay, group["weight_decay"] = group["weight_decay"], 0
    try:
        optimizer.step()
    finally:
        group["momentum"], group["dampening"], group["nesterov"], group["weight_decay"] = (
            own,
            dampening,
            nesterov,
            decay,
        )


def _step_nadam(optimizer: Optimizer, group: dict[str, Any], staleness: float) -> None:
    own = group["betas"]
    group["betas"] = (momentum(own[0], staleness), own[1])
    try:
        optimizer.step()
    finally:
        group["betas"] = own


@torch.no_grad()
def _step_adam(optimizer: Optimizer, group: dict[str, Any], staleness: float) -> None:
    now = momentum(group["betas"][0], staleness)
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    for bucket in foreach_buckets(stepped, lambda parameter: parameter):
        _step_adam_of(bucket, [_adam_state(optimizer, group, each) for each in bucket], group, now)


def _adam_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        # Torch creates a parameter's state at its first step. That is this one if the parameter had no gradient before.
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def _step_adam_of(parameters: list[Tensor], states: list[dict[str, Any]], group: Mapping[str, Any], now: float) -> None:
    """Steps these parameters with one call per line for all of them: on a GPU the calls dominate the time of small
    parameters."""
    beta1, beta2 = group["betas"]
    rate, decay = group["lr"], group["weight_decay"]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    before = [float(state["step"]) for state in states]
    torch._foreach_add_([state["step"] for state in states], 1)
    if decay and group["decoupled_weight_decay"]:
        torch._foreach_mul_(parameters, 1 - rate * decay)
    elif decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
    means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    torch._foreach_lerp_(means, gradients, 1 - now)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    if group["amsgrad"]:
        largest = [state["max_exp_avg_sq"] for state in states]
        torch._foreach_maximum_(largest, squares)
        squares = largest
    products = [state.get(PRODUCT, beta1**steps) * now for state, steps in zip(states, before, strict=True)]
    for state, product in zip(states, products, strict=True):
        state[PRODUCT] = product
    scales = torch._foreach_sqrt(squares)
    torch._foreach_div_(scales, [math.sqrt(1 - beta2 ** (steps + 1)) for steps in before])
    torch._foreach_add_(scales, group["eps"])
    torch._foreach_addcdiv_(parameters, gradients, scales, [-rate * (1 - now) / (1 - p) for p in products])
    torch._foreach_addcdiv_(parameters, means, scales, [-rate * now / (1 - p * now) for p in products])
