"""What a correction of staleness is, and all of them by name.

A correction stands between a stage and its optimizer: it may say which weights a forward uses, and it steps the
optimizer. Where nothing is stale it does exactly what the optimizer does alone, bit for bit. What it remembers of a
parameter lies in the optimizer's own state, and is saved, restored and handed on with the parameter; how stale updates
are is measured anew wherever a stage is deployed.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import cautious, discount, foresight, nesterov, predict
from ravnest.engine.corrections.plain import Plain
from ravnest.errors import GraphError
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec

CAUTIOUS: Final = "cautious"
"""The one that is careful in other ways too: with it, the number in flight follows the learning rate
(planner/in_flight/lr_bound.py)."""

DEFAULT: Final = CAUTIOUS
"""What learns best, by `python -m benchmarks.quality`."""

PREDICTING: Final = ("predict", "foresight", "cautious")
"""Those that give forwards weights of their own: a stage takes memory for them."""


class Correction(Protocol):
    """The correction of one stage. Not thread-safe, as the stage is not."""

    def forward_weights(self) -> dict[str, Tensor] | None:
        """The weights the next training forward uses, by name, in memory of their own that several forwards may
        share; None: the current ones."""

    def moved(self) -> None:
        """The weights have changed otherwise than by an update, as averaging changes them."""

    def begin_update(self, staleness: float, version: int) -> None:
        """An update begins, of gradients that are so stale on average; so many updates were made before it."""

    def step(self) -> None:
        """Steps the parameters that have gradients: an update is made of one or more of these."""


def correction_named(
    name: str,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    warm_up_updates: int = discount.WARM_UP_UPDATES,
) -> Correction:
    """The correction of a stage with this optimizer of these parameters, as they are called in its graph; over the
    first `warm_up_updates`, those that discount the rate do so less and less.

    Where it has no meaning for the optimizer, that is none (`correction_refusal` says why). GraphError: no such name.
    """
    if name not in CORRECTIONS:
        raise GraphError(f"there is no correction of staleness {name[:80]!r}; use one of {', '.join(CORRECTIONS)}")
    if name == "none" or _refusal(name, optimizer) is not None:
        return Plain(optimizer)
    if name == "discount":
        return discount.Discount(optimizer, warm_up_updates)
    if name == "predict":
        return predict.Predict(optimizer, parameters)
    if name == "nesterov":
        return nesterov.Nesterov(optimizer)
    if name == "foresight":
        return foresight.Foresight(optimizer, parameters)
    return cautious.Cautious(optimizer, parameters, warm_up_updates)


def correction_refusal(name: str, spec: OptimizerSpec) -> str | None:
    """Why this correction is not applied to such an optimizer; None where it is."""
    return _refusal(name, spec.build([Tensor(1, 1).zero_().requires_grad_()]))


_REFUSALS: Final[Mapping[str, Callable[[Optimizer], str | None]]] = {
    "none": lambda _: None,
    "discount": discount.refusal,
    "predict": predict.refusal,
    "nesterov": nesterov.refusal,
    "foresight": foresight.refusal,
    "cautious": cautious.refusal,
}


def _refusal(name: str, optimizer: Optimizer) -> str | None:
    return _REFUSALS[name](optimizer)
