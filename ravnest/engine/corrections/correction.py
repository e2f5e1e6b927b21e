"""Interface of the corrections of staleness, and their registry by name.

A correction sits between a stage and its optimizer: it steps the optimizer, and it may choose the weights that a
forward uses. Without staleness the result equals that of the optimizer alone, bit for bit. A correction stores its
per-parameter values in the optimizer's state, so they are saved, restored and moved with the parameter. The staleness
is measured again after each deployment.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections import cautious, discount, foresight, nesterov, predict
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.weights.blocks import Block
from ravnest.errors import GraphError
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec

CAUTIOUS: Final = "cautious"
"""With this correction, the number of microbatches in flight also follows the learning rate
(planner/in_flight/lr_bound.py)."""

DEFAULT: Final = CAUTIOUS
"""The correction with the best result in `python -m benchmarks.quality`."""

PREDICTING: Final = ("predict", "foresight", "cautious")
"""Corrections that compute predicted weights for forwards, which take memory at a stage."""


class Correction(Protocol):
    """The correction of one stage. Not thread-safe, like the stage."""

    def forward_weights(self) -> dict[str, Tensor] | None:
        """The weights for the next training forward by name, in separate memory that several forwards may share; None:
        the current weights."""

    def moved(self) -> None:
        """Called after the weights have changed without an update, such as by averaging."""

    def begin_update(self, staleness: float, version: int) -> None:
        """Called before an update with the mean staleness of its gradients; `version` updates were made before it."""

    @property
    def predicts(self) -> bool:
        """Whether the forwards after the update that has begun use predicted weights."""

    def step(self, block: Block) -> None:
        """Steps the parameters of this block that have gradients, and writes the predicted weights of all of them to
        `block.ahead`, if set. Their memory may be that of the gradients."""

    def end_update(self, predicted: dict[str, Tensor] | None) -> None:
        """Called after all blocks of an update, with the predicted weights by name, if they were written."""


def correction_named(
    name: str,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    warm_up_updates: int = discount.WARM_UP_UPDATES,
) -> Correction:
    """The correction of this name for a stage's optimizer and its parameters, named as in the graph.

    `warm_up_updates`: number of updates over which a discount of the learning rate ends. For an optimizer that the
    correction does not support, the result is `Plain`; `correction_refusal` gives the reason. GraphError: unknown name.
    """
    if name not in CORRECTIONS:
        raise GraphError(f"there is no correction of staleness {name[:80]!r}; use one of {', '.join(CORRECTIONS)}")
    refusal, make = _CHOICES[name]
    if refusal(optimizer) is not None:
        return Plain(optimizer)
    return make(optimizer, parameters, warm_up_updates)


def correction_refusal(name: str, spec: OptimizerSpec) -> str | None:
    """The reason why this correction does not support such an optimizer; None if it does."""
    return _CHOICES[name][0](spec.build([Tensor(1, 1).zero_().requires_grad_()]))


_Make = Callable[[Optimizer, Mapping[str, Tensor], int], Correction]

_CHOICES: Final[Mapping[str, tuple[Callable[[Optimizer], str | None], _Make]]] = {
    "none": (lambda _: None, lambda optimizer, parameters, updates: Plain(optimizer)),
    "discount": (discount.refusal, lambda optimizer, parameters, updates: discount.Discount(optimizer, updates)),
    "predict": (predict.refusal, lambda optimizer, parameters, updates: predict.Predict(optimizer, parameters)),
    "nesterov": (nesterov.refusal, lambda optimizer, parameters, updates: nesterov.NesterovCorrection(optimizer)),
    "foresight": (foresight.refusal, lambda optimizer, parameters, updates: foresight.Foresight(optimizer, parameters)),
    "cautious": (cautious.refusal, cautious.Cautious),
}
"""For each correction, the reason why it does not support an optimizer, and how it is made."""
