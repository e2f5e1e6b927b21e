"""Correction "nesterov": Nesterov's step with a momentum that grows with staleness.

After Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (2025): with a momentum near 1,
Nesterov's look-ahead compensates for the delay, because the direction hardly changes while a gradient is in flight, and
the stale gradient itself has a weight of only 1 - momentum. In the form of NAdam the parameters are already the
look-ahead point, so forwards use the current weights.

The momentum g of a stage follows from the momentum b of the job's optimizer and the measured staleness s:
1 - g = (1 - b) / (1 + s), with g at most MAX_MOMENTUM. Without staleness g = b, and the step is the optimizer's own.
With b = 0.9 and 7 updates of staleness g is 0.9875, about the paper's value for 8 stages.
"""

from typing import Any, Final

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.adam import step_adam
from ravnest.engine.weights.blocks import Block

MAX_MOMENTUM: Final = 0.99


class NesterovCorrection(Plain):
    """Steps Adam, AdamW and NAdam as NAdam, and SGD with Nesterov's momentum, with the momentum for the staleness."""

    def __init__(self, optimizer: Optimizer, growth: float = 1.0) -> None:
        """`growth`: factor of the staleness in the formula of the momentum."""
        super().__init__(optimizer)
        self._growth = growth
        self._staleness = ExpectedStaleness()

    def begin_update(self, staleness: float, version: int) -> None:
        self._staleness.add(staleness)

    def step(self, block: Block) -> None:
        self._step(block)

    def _step(self, block: Block) -> list[Tensor] | None:
        """Steps the block; returns the scales of `scales_of` if they were computed for all its parameters."""
        staleness = self._growth * self._staleness.value
        if not staleness:
            block.step()
            return None
        [group] = self._optimizer.param_groups
        if isinstance(self._optimizer, SGD):
            _step_sgd(block, group, staleness)
        elif isinstance(self._optimizer, NAdam):
            _step_nadam(block, group, staleness)
        else:
            now = momentum(group["betas"][0], staleness)
            return step_adam(block.parameters, block.states, group, now)
        return None


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


def _step_sgd(block: Block, group: dict[str, Any], staleness: float) -> None:
    own, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
    group["momentum"] = momentum(own, staleness)
    # A mean over more gradients, each with a lower weight: the sum of the weights is that of the job's momentum. Torch
    # supports Nesterov's step only without dampening.
    factor = (1 - dampening) * (1 - group["momentum"]) / (1 - own)
    group["dampening"], group["nesterov"] = 0, True
    for parameter in block.parameters:
        if parameter.grad is not None:
            if group["weight_decay"]:
                # Weight decay is part of the gradient and is scaled with it.
                parameter.grad.add_(
                    parameter.detach(), alpha=-group["weight_decay"] if group["maximize"] else group["weight_decay"]
                )
            parameter.grad.mul_(factor)
    decay, group["weight_decay"] = group["weight_decay"], 0
    try:
        block.step()
    finally:
        group["momentum"], group["dampening"], group["nesterov"], group["weight_decay"] = (
            own,
            dampening,
            nesterov,
            decay,
        )


def _step_nadam(block: Block, group: dict[str, Any], staleness: float) -> None:
    own = group["betas"]
    group["betas"] = (momentum(own[0], staleness), own[1])
    try:
        block.step()
    finally:
        group["betas"] = own
