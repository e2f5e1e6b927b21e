"""A backward in two parts that compute nothing twice: first what the stage before waits for, then the stage's own.

While the graph is run, each product or convolution gets a leaf of its own in place of a weight (graph/weight_uses.py).
Asked for the gradients of what came in and of what came out of these operators, autograd leaves out the gradients of
those leaves. What it gives for an operator's result is all that the gradient of its weight needs, later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ravnest.graph.program import WeightUse

Gradients = dict[str, torch.Tensor | None]


class SplitBackward:
    """The backward of one microbatch, whose uses of weights were set apart as its forward ran."""

    def __init__(self, apart: Sequence[WeightUse]) -> None:
        self._waiting: list[tuple[WeightUse, torch.Tensor | None]] = [(use, None) for use in apart]

    def first(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradients of `wanted`, without what reaches weights through the uses that were set apart."""
        uses = [use for use, _ in self._waiting]
        places: list[Any] = [*wanted, *(use.output for use in uses)]
        found = torch.autograd.grad(outputs, places, given, retain_graph=True, allow_unused=True)
        self._waiting = list(zip(uses, found[len(wanted) :], strict=True))
        return list(found[: len(wanted)])

    def rest(self, weights: Mapping[str, torch.Tensor], found: Gradients) -> Gradients:
        """The gradients of the weights in full: those that `first` found, by name, and what the uses add to them."""
        names = {id(weight): name for name, weight in weights.items()}
        sums = dict(found)
        chains: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The last first: with each that is done, what nothing else needs of the graph can go.
        while self._waiting:
            use, arrived = self._waiting.pop()
            if arrived is None:
                continue
            leaves = [leaf for _, leaf in use.weights]
            # From its result, an operator's own leaves are reached through the operator alone.
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
            # What was computed from weights alone, such as a transposed or a normed one: on to the weights themselves.
            ends, arrived_there = zip(*chains, strict=True)
            more = torch.autograd.grad(ends, list(weights.values()), arrived_there, allow_unused=True)
            for name, gradient in zip(weights, more, strict=True):
                if gradient is not None:
                    sums[name] = _sum(sums[name], gradient)
        return sums


def _sum(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one + other
