"""Correction "predict": forwards use the weights predicted for the time at which their gradients are applied.

As in SpecTrain (Chen et al., 2018) and XPipe (Guan et al., 2019), the prediction assumes as many updates as the
gradients are stale, each with the optimizer's current velocity. Predicted weights are never saved, averaged or
evaluated.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ravnest.engine.corrections.expected import ExpectedStaleness
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.adam import PRODUCT, scales_of
from ravnest.engine.weights.blocks import Ahead, Block, Blocks
from ravnest.engine.weights.packed_moments import reading

_ADAMS: Final = ("Adam", "AdamW", "NAdam")


class Predict(Plain):
    """Steps the optimizer unchanged, and predicts the weights for forwards."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(optimizer)
        self._parameters = parameters
        self._blocks = Blocks(optimizer, parameters)
        self._staleness = ExpectedStaleness()
        self._predicted: dict[str, Tensor] | None = None
        """Shared by all forwards until the next update."""

    @property
    def predicts(self) -> bool:
        return bool(self._staleness.value)

    def forward_weights(self) -> dict[str, Tensor] | None:
        if self.predicts and self._predicted is None:
            self._predicted = self._predict()
        return self._predicted

    def moved(self) -> None:
        self._predicted = None

    def begin_update(self, staleness: float, version: int) -> None:
        self._staleness.add(staleness)
        self._predicted = None

    def step(self, block: Block) -> None:
        block.step()
        if block.ahead is not None:
            self.write(block, block.ahead)

    def end_update(self, predicted: dict[str, Tensor] | None) -> None:
        self._predicted = predicted

    @torch.no_grad()
    def write(self, block: Block, ahead: Ahead, scales: list[Tensor] | None = None) -> None:
        """Writes the predicted weights of a block: those after updates with the last velocity.

        `scales` are those of the step (`scales_of`), which are computed again if they are not given.
        """
        far = self._staleness.value * ahead.options["lr"]
        # A parameter that never had a gradient does not move, but must not share memory with the master.
        torch._foreach_copy_(list(ahead.weights), block.parameters)
        moving = [index for index, state in enumerate(block.states) if _moves(state)]
        weights, states = [ahead.weights[index] for index in moving], [block.states[index] for index in moving]
        if not moving:
            return
        if type(self._optimizer) is SGD:
            momenta = [state["momentum_buffer"] for state in states]
            torch._foreach_add_(weights, momenta, alpha=far if ahead.options["maximize"] else -far)
            return
        counts = [float(state["step"]) for state in states]
        beta1 = ahead.options["betas"][0]
        # The product of all momenta, for the bias correction of the mean; the momentum may have changed over time.
        left = [
            float(state.get("mu_product", state.get(PRODUCT, beta1**count)))
            for state, count in zip(states, counts, strict=True)
        ]
        if scales is None:
            squares = [state["max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq"] for state in states]
            scales = scales_of(squares, counts, ahead.options)
        means = [state["exp_avg"] for state in states]
        torch._foreach_addcdiv_(weights, means, scales, [-far / (1 - each) for each in left])

    def _predict(self) -> dict[str, Tensor]:
        """The predicted weights in new memory, after a change of the weights that was no update."""
        [options] = self._optimizer.param_groups
        found = {name: torch.empty_like(parameter.detach()) for name, parameter in self._parameters.items()}
        for group in self._blocks.groups:
            with reading(self._optimizer, [self._parameters[name] for name in group]):
                for block in self._blocks.of(group):
                    self.write(block, Ahead([block.cut(found[name]) for name in block.names], options))
        return {name: weights.requires_grad_() for name, weights in found.items()}


def refusal(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if name == "SGD" and not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum keeps no velocity to predict weights from"
    if name not in (*_ADAMS, "SGD"):
        return f"the updates of {name} cannot be predicted; predict works with {', '.join(_ADAMS)} and SGD"
    return None


def _moves(state: Mapping[str, Any]) -> bool:
    return "exp_avg" in state or state.get("momentum_buffer") is not None
