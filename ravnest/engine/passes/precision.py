"""In what a stage computes: float32, or mixed precision, with products and convolutions in half as many bits.

Parameters, their gradients and updates, and what travels between stages are float32 in any case; so stages of one
cluster may compute as each of their devices can. Evaluation is float32 too: what is evaluated is what is exported.

In float16 small gradients would vanish. Each stage multiplies those it gets with a factor of its own before its
backward, and divides by it in float32 what comes out: no other stage needs to know. Where that overflows, the backward
is done again with a smaller factor, so every microbatch counts.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

FIRST_FACTOR: Final = 2.0**16
LARGEST_FACTOR: Final = 2.0**24
GROWS_AFTER: Final = 2000
"""Backwards without an overflow, until the factor is doubled."""

_TYPES: Final = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

Gradients = tuple[torch.Tensor | None, ...]


class Precision:
    """How one stage computes, on one device."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name` is one of settings.PRECISIONS. On a device that has no mixed precision, it is float32."""
        self._dtype = _TYPES[name] if torch.amp.is_autocast_available(device.type) else None
        self._device_type = device.type
        self._factor = FIRST_FACTOR if self._dtype is torch.float16 else 1.0
        self._good = 0

    @property
    def factor(self) -> float:
        """What gradients are multiplied with on their way through this stage."""
        return self._factor

    @property
    def scales(self) -> bool:
        """Whether gradients are multiplied at all."""
        return self._dtype is torch.float16

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Surrounds a training forward."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def as_told(self, results: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]) -> dict[str, Any]:
        """What came of a forward, in the types that the next stage expects; the loss in float32. Gradients go back
        through the change."""
        if self._dtype is None:
            return dict(results)
        wanted = {name: dtypes.get(name) or torch.float32 for name in results}
        return {
            name: value.to(wanted[name]) if isinstance(value, torch.Tensor) and value.dtype is self._dtype else value
            for name, value in results.items()
        }

    def gradients(
        self,
        outputs: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        all_leaves: bool = False,
    ) -> Gradients:
        """The gradients of what is wanted; None for what the outputs do not depend on. With `all_leaves` that is every
        leaf there is which they do depend on, and none of these has a gradient.

        They are not finite only where they would not be in float32 either, as far as this can tell: with a factor of 1.
        """
        if not wanted:
            # A stage may have nothing to train and nothing before it that is trained; torch refuses to be asked.
            return ()
        if not self.scales:
            if all_leaves:
                return _of_leaves(outputs, wanted, given)
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        while True:
            factor = self._factor
            last = factor == 1.0
            found = torch.autograd.grad(
                outputs, wanted, [g * factor for g in given], allow_unused=True, retain_graph=not last
            )
            finite = _all_finite(found)
            if finite or last:
                break
            self._factor, self._good = max(1.0, factor / 2), 0
        if finite:
            self._good += 1
            if self._good >= GROWS_AFTER:
                self._factor, self._good = min(LARGEST_FACTOR, 2 * factor), 0
        return tuple(None if g is None else g / factor for g in found)


def _of_leaves(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Gradients:
    """As autograd.grad, and sooner: to ask for some of the gradients, autograd goes through the whole graph first."""
    try:
        torch.autograd.backward(outputs, given)
        return tuple(leaf.grad for leaf in leaves)
    finally:
        for leaf in leaves:
            leaf.grad = None


def _all_finite(tensors: Gradients) -> bool:
    found = [torch.isfinite(t).all() for t in tensors if t is not None]
    # One look at the device for all of them.
    return not found or bool(torch.stack(found).all())
