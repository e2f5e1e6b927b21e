"""Correction "discount": a lower learning rate for stale updates, during the first updates of a run.

This is PipeMare's first technique (Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021): the
learning rate is divided by delay**p, and p falls from 1 to 0 over the first updates. The delay is the staleness plus
one, so updates without staleness are unchanged. Staleness does the most harm early, when gradients change most from
update to update.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.optim import Optimizer

from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.blocks import Block

WARM_UP_UPDATES: Final = 500
"""Maximum number of updates over which the discount ends."""
WARM_UP_DIVISOR: Final = 6
"""Divisor of a run's length: the discount ends within a sixth of the run, because a run that ends earlier learns too
little."""


def warm_up_updates(run_updates: int | None) -> int:
    """Number of updates over which the discount ends in a run of this many updates; None: unknown."""
    return WARM_UP_UPDATES if run_updates is None else max(1, min(WARM_UP_UPDATES, run_updates // WARM_UP_DIVISOR))


class Discount(Plain):
    """Steps the optimizer with a discounted learning rate."""

    def __init__(self, optimizer: Optimizer, warm_up_updates: int = WARM_UP_UPDATES) -> None:
        super().__init__(optimizer)
        self._warm_up_updates = warm_up_updates
        self._factor = 1.0

    def begin_update(self, staleness: float, version: int) -> None:
        power = max(0.0, 1.0 - version / self._warm_up_updates)
        self._factor = (1.0 + max(0, staleness)) ** -power

    def step(self, block: Block) -> None:
        with self.applied():
            block.step()

    def discounted(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """These options of the optimizer, with the discounted learning rate."""
        return {**options, "lr": options["lr"] * self._factor}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the optimizer's learning rates are discounted."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self._factor != 1.0:
            for group in groups:
                group["lr"] *= self._factor
        try:
            yield
        finally:
            # Restore the exact values, because schedules continue from them; a division could round.
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def refusal(optimizer: Optimizer) -> str | None:
    if all("lr" in group for group in optimizer.param_groups):
        return None
    return f"{type(optimizer).__name__} has no learning rate to discount"
