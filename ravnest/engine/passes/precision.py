"""Precision of a stage's training: float32, or mixed precision with products and convolutions in 16 bits.

Parameters, their gradients and updates, and the values sent between stages are always float32, so the stages of a
cluster may use different precisions, as their devices support. Evaluation is float32 too: the exported model is the one
that was evaluated.

Small gradients underflow in float16. Each stage therefore multiplies the gradients that arrive by a loss scale of its
own before the backward, and divides the results by it in float32; other stages do not notice. If the backward
overflows, it is repeated with a smaller scale, so no microbatch is skipped.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

FIRST_SCALE: Final = 2.0**16
MAX_SCALE: Final = 2.0**24
GROWS_AFTER: Final = 2000
"""Number of backwards without an overflow after which the scale is doubled."""

_TYPES: Final = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

Gradients = tuple[torch.Tensor | None, ...]


class Precision:
    """The precision of one stage on one device, and its loss scale."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name` is one of settings.PRECISIONS. A device without mixed precision computes in float32."""
        self._dtype = _TYPES[name] if torch.amp.is_autocast_available(device.type) else None
        self._device_type = device.type
        self._scale = FIRST_SCALE if self._dtype is torch.float16 else 1.0
        self._good = 0

    @property
    def scale(self) -> float:
        """The current loss scale."""
        return self._scale

    @property
    def scales(self) -> bool:
        """Whether a loss scale is used."""
        return self._dtype is torch.float16

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context of a training forward."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def cast(self, results: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]) -> dict[str, Any]:
        """The results of a forward in the types that the next stage expects, the loss in float32. Gradients flow back
        through the conversion."""
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
        """The gradients of `wanted`; None for a tensor that the outputs do not depend on.

        With `all_leaves`, `wanted` holds every leaf that the outputs depend on, and none has a gradient yet. A gradient
        that is not finite is returned only if it is not finite with a scale of 1 either.
        """
        if not wanted:
            # A stage may have nothing to train, and no stage before it that has; torch raises an error then.
            return ()
        if not self.scales:
            if all_leaves:
                return _of_leaves(outputs, wanted, given)
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        while True:
            scale = self._scale
            last = scale == 1.0
            found = torch.autograd.grad(
                outputs, wanted, [g * scale for g in given], allow_unused=True, retain_graph=not last
            )
            finite = _all_finite(found)
            if finite or last:
                break
            self._scale, self._good = max(1.0, scale / 2), 0
        if finite:
            self._good += 1
            if self._good >= GROWS_AFTER:
                self._scale, self._good = min(MAX_SCALE, 2 * scale), 0
        return tuple(None if g is None else g / scale for g in found)


def _of_leaves(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Gradients:
    """The same as autograd.grad, but faster: autograd.grad first searches the whole graph for the tensors wanted."""
    try:
        torch.autograd.backward(outputs, given)
        return tuple(leaf.grad for leaf in leaves)
    finally:
        for leaf in leaves:
            leaf.grad = None


def _all_finite(tensors: Gradients) -> bool:
    found = [torch.isfinite(t).all() for t in tensors if t is not None]
    # One synchronization with the device for all tensors.
    return not found or bool(torch.stack(found).all())
