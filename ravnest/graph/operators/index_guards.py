"""Guards of indices and divisors that kernels use unchecked."""

from collections.abc import Callable
from typing import Any, Final

import torch

from ravnest.graph.operators.calls import Call

_WHOLE: Final = (torch.int32, torch.int64)


def _bag_shapes(call: Call) -> str:
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    if weight.dim() != 2 or 0 in weight.shape or indices.dim() != 1 or offsets.dim() != 1:
        return "gives weights, indices or offsets of other dimensions than it takes"
    if indices.dtype not in _WHOLE or offsets.dtype not in _WHOLE:
        return "gives indices or offsets that are not integers"
    if not offsets.numel():
        return "gives no bag"
    scales = call["per_sample_weights"]
    if scales is not None and (scales.shape != indices.shape or scales.dtype != weight.dtype or call.number("mode", 0)):
        return "gives weights of another shape than its indices"
    padding = call["padding_idx"]
    if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
        return f"pads with row {padding} of {weight.shape[0]}"
    return ""


def _bag_values(call: Call) -> str:
    reason = _bag_shapes(call)
    if reason:
        return reason
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.shape[0]:
        return f"gives indices outside the {weight.shape[0]} rows"
    if int(offsets[0]) != 0 or int(offsets[-1]) > indices.numel() or bool((offsets[1:] < offsets[:-1]).any()):
        return "gives offsets that do not increase from 0 to the number of indices"
    if call["include_last_offset"] and int(offsets[-1]) != indices.numel():
        return "gives a last offset that is not the number of indices"
    return ""


def _grid_values(call: Call) -> str:
    """Non-finite coordinates become positions outside the input, at the latest in the backward."""
    grid = call["grid"]
    on_processor = grid.device.type == "cpu"
    return "gives coordinates that are not finite" if on_processor and not bool(grid.isfinite().all()) else ""


def _division(call: Call) -> str:
    """The smallest integer divided by -1 overflows, and the processor aborts the process."""
    own, other = call["self"], call["other"]
    if _is_real(own) or _is_real(other):
        return ""
    if isinstance(own, torch.Tensor) and own.device.type != "cpu":
        return ""
    if isinstance(other, torch.Tensor):
        if not other.numel() or not bool((other == -1).any()):
            return ""
    elif other != -1:
        return ""
    smallest = int(own.min()) if isinstance(own, torch.Tensor) and own.numel() else own
    if isinstance(smallest, int) and smallest in (-(2**31), -(2**63)):
        return "divides the smallest integer by -1"
    return ""


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype not in _WHOLE
    return not isinstance(value, int)


def _rounded(call: Call) -> str:
    return _division(call) if call["rounding_mode"] is not None else ""


_WHOLE_DIVISIONS: Final = "floor_divide floor_divide_ fmod fmod_ remainder remainder_".split()
_ROUNDED_DIVISIONS: Final = ("div", "div_", "divide")
DIVISIONS: Final = frozenset((*_WHOLE_DIVISIONS, *_ROUNDED_DIVISIONS))
"""Operators for which only a divisor of -1 is dangerous."""
SHAPES: Final[dict[str, Callable[[Call], str]]] = {}
VALUES: Final[dict[str, Callable[[Call], str]]] = {
    "embedding_bag": _bag_values,
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _grid_values),
    **dict.fromkeys(_WHOLE_DIVISIONS, _division),
    **{f"{name}.{kind}_mode": _rounded for name in _ROUNDED_DIVISIONS for kind in ("Tensor", "Scalar")},
}
