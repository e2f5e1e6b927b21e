"""Gradients of looked-up rows, until they are summed with the gradients of the stage's own pass.

They come later than those of the pass (passes/row_lookups.py). So the gradients of a pass wait here until the update,
and get those of the rows that have come by then. Their sum is the same to the last digit as that of a plain backward if
the rows of the same microbatch have come.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from ravnest.engine.weights.gradient_sum import GradientSum


@dataclass(frozen=True, slots=True)
class RowGradient:
    """Gradient of some rows of a parameter."""

    parameter: str
    numbers: torch.Tensor
    """Flat, each row once."""
    rows: torch.Tensor
    """One row for each number."""

    @classmethod
    def summed(cls, parameter: str, numbers: torch.Tensor, rows: torch.Tensor) -> Self:
        """From rows of which some may come several times. They are summed first, as PyTorch does: the sum is then the
        same to the last digit."""
        once, places = torch.unique(numbers, return_inverse=True)
        return cls(parameter, once, rows.new_zeros(len(once), rows.shape[1]).index_add_(0, places, rows))

    def add_to(self, gradient: torch.Tensor) -> None:
        """Adds the rows to the gradient of the whole parameter, in place."""
        gradient.index_add_(0, self.numbers, self.rows.to(gradient.dtype))


@dataclass(frozen=True, slots=True)
class _Pass:
    """The weight gradients of the stage's own pass over one microbatch."""

    gradients: dict[str, torch.Tensor | None]
    version: int
    exchanged: list[torch.Tensor]
    """Gradients of activations, which may share memory with these."""


class RowGradients:
    """The gradients of one stage that are not summed yet."""

    def __init__(self) -> None:
        self._rows: list[RowGradient] = []
        self._microbatches: list[int] = []
        """Those whose rows the next update includes."""
        self._pass: _Pass | None = None

    @property
    def is_empty(self) -> bool:
        return self._pass is None and not self._rows

    def add(self, microbatch: int, rows: list[RowGradient]) -> None:
        """The gradients of the rows of a microbatch have come."""
        self._rows += rows
        self._microbatches.append(microbatch)

    def hold(self, gradients: dict[str, torch.Tensor | None], version: int, exchanged: list[torch.Tensor]) -> None:
        """Keeps the gradients of the stage's own pass over a microbatch until `sum_into`."""
        self._pass = _Pass(gradients, version, exchanged)

    def sum_into(
        self, total: GradientSum, masters: Mapping[str, torch.Tensor], version: int, accumulate: int = 1
    ) -> None:
        """Adds all that is here to the sum; `version` is the current one, and `accumulate` the number of microbatches
        of an update."""
        if self.is_empty:
            return
        # Without a pass, these are rows of replayed microbatches, whose own gradients are part of earlier updates: they
        # count as one microbatch only if no other does, and have the weight that they would have had in those updates.
        is_alone = self._pass is None and not total.versions
        is_counted = self._pass is not None or is_alone
        own = self._pass or _Pass({}, version, [])
        taken = {gradient.untyped_storage().data_ptr() for gradient in own.exchanged}
        for found in self._rows:
            gradient = own.gradients.get(found.parameter)
            if gradient is None:
                gradient = torch.zeros_like(masters[found.parameter])
            elif gradient.untyped_storage().data_ptr() in taken or 0 in gradient.stride():
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            found.add_to(gradient)
            own.gradients[found.parameter] = gradient
        self._rows, self._pass = [], None
        total.add(own.gradients, own.version, own.exchanged)
        if not is_counted:
            total.versions.pop()
        if is_alone:
            total.part_of = accumulate

    def pop_microbatches(self) -> tuple[int, ...]:
        """The microbatches whose rows are part of the update that was made."""
        found, self._microbatches = tuple(self._microbatches), []
        return found

    def forget(self) -> None:
        self._rows, self._microbatches, self._pass = [], [], None
