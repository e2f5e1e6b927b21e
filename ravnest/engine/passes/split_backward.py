"""Split backward: first the gradients that the stage before waits for, then those of the stage's own weights.

Nothing is computed twice. During the forward, each product or convolution uses a leaf of its own in place of a weight
(graph/weight_uses.py). The first part asks autograd only for the gradients of the stage's inputs and of the results of
these operators, so autograd skips those leaves. The gradient of an operator's result is all that the second part needs
for the gradient of its weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ravnest.graph.program import WeightUse

Gradients = dict[str, torch.Tensor | None]


class SplitBackward:
    """The backward of one microbatch, with the weight uses that its forward recorded."""

    def __init__(self, apart: Sequence[WeightUse]) -> None:
        self._waiting: list[tuple[WeightUse, torch.Tensor | None]] = [(use, None) for use in apart]

    def first(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradients of `wanted`, without the contributions to weights through the recorded uses."""
        uses = [use for use, _ in self._waiting]
        places: list[Any] = [*wanted, *(use.output for use in uses)]
        found = torch.autograd.grad(outputs, places, given, retain_graph=True, allow_unused=True)
        self._waiting = list(zip(uses, found[len(wanted) :], strict=True))
        return list(found[: len(wanted)])

    def rest(self, weights: Mapping[str, torch.Tensor], found: Gradients) -> Gradients:
        """The complete weight gradients by name: those that `first` returned, plus the contributions of the uses."""
        names = {id(weight): name for name, weight in weights.items()}
        sums = dict(found)
        chains: list[tuple[torch.Tensor, torch.Tensor]] = []
        # From last to first, so that the part of the graph that only this use needs is freed after each step.
        while self._waiting:
            use, arrived = self._waiting.pop()
            if arrived is None:
                continue
            leaves = [leaf for _, leaf in use.weights]
            # The only path from an operator's result to its own leaves is the operator.
            gradients = torch.autograd.grad([use.output], leaves, [arrived], allow_unused=True)
            for (weight, _), gradient in zip(use.weights, gradients, strict=True):
                if gradient is None:
                    continue
                name = names.get(id(weight))
                if name is None:
                    chains.append((weight, gradient))
                else:
                    sums[name] = _sum(sums[name], gradient)
        if chains:
            # Values computed from weights alone, such as a transposed or normalized weight: continue to the weights.
            ends, arrived_there = zip(*chains, strict=True)
            more = torch.autograd.grad(ends, list(weights.values()), arrived_there, allow_unused=True)
            for name, gradient in zip(weights, more, strict=True):
                if gradient is not None:
                    sums[name] = _sum(sums[name], gradient)
        return sums


def _sum(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one + other
