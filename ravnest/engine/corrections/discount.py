"""A lower learning rate the staler an update is, which is lifted as training goes on.

As PipeMare's first technique (Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021): the rate is
divided by delay**p, where p falls from 1 to 0 over the first updates. A delay is here one more than the staleness, so
that nothing changes where nothing is stale. Early gradients change most from update to update, hence it is then that
staleness does harm.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

WARM_UP_UPDATES: Final = 500
"""Over so many updates the discount is lifted, at most;"""
WARM_UP_PART: Final = 6
"""and over this part of a run whose length is known: one that ends before it is lifted has learned too little."""


def warm_up_updates(run_updates: int | None) -> int:
    """Over how many updates the discount is lifted in a run of so many; None: nobody knows."""
    return WARM_UP_UPDATES if run_updates is None else max(1, min(WARM_UP_UPDATES, run_updates // WARM_UP_PART))


class Discount:
    """Steps the optimizer with a learning rate that is discounted for the time of the step."""

    def __init__(self, optimizer: Optimizer, warm_up_updates: int = WARM_UP_UPDATES) -> None:
        self._optimizer = optimizer
        self._warm_up_updates = warm_up_updates
        self._factor = 1.0

    def forward_weights(self) -> dict[str, Tensor] | None:
        return None

    def moved(self) -> None:
        pass

    def begin_update(self, staleness: float, version: int) -> None:
        power = max(0.0, 1.0 - version / self._warm_up_updates)
        self._factor = (1.0 + max(0, staleness)) ** -power

    def step(self) -> None:
        with self.applied():
            self._optimizer.step()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The optimizer's rates are discounted meanwhile."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self._factor != 1.0:
            for group in groups:
                group["lr"] *= self._factor
        try:
            yield
        finally:
            # The very rates, and not what dividing again would give: schedules go on from them.
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def refusal(optimizer: Optimizer) -> str | None:
    if all("lr" in group for group in optimizer.param_groups):
        return None
    return f"{type(optimizer).__name__} has no learning rate to discount"
