"""Guards of norms whose kernels do not check the sizes that they are given."""

from collections.abc import Callable
from typing import Final

import torch

from ravnest.graph.operators.calls import Call


def _weight_norm(call: Call) -> str:
    own, scale, dim = call["v"], call["g"], call.number("dim", 0)
    if own.dtype != scale.dtype or own.device != scale.device or not own.is_floating_point():
        return "mixes element types or devices"
    if not -1 <= dim < own.dim() or own.numel() == 0:
        return f"takes dimension {dim} of a tensor of shape {tuple(own.shape)}"
    if dim == -1:
        return "" if scale.numel() == 1 and scale.dim() <= own.dim() else "gives more than one scale"
    expected = tuple(size if place == dim else 1 for place, size in enumerate(own.shape))
    return "" if tuple(scale.shape) == expected else f"gives scales of shape {tuple(scale.shape)}, not {expected}"


def _native_group_norm(call: Call) -> str:
    own = call["input"]
    batch, channels, rest, groups = (call.number(name, 0) for name in ("N", "C", "HxW", "group"))
    if own.dim() < 2 or min(batch, channels, rest, groups) < 1:
        return "gives sizes below 1"
    if own.shape[0] != batch or own.shape[1] != channels or batch * channels * rest != own.numel() or channels % groups:
        return f"gives sizes that differ from those of its input, {tuple(own.shape)}"
    for name in ("weight", "bias"):
        if call[name] is not None and tuple(call[name].shape) != (channels,):
            return f"gives a {name} of shape {tuple(call[name].shape)} for {channels} channels"
    return ""


def _group_norm(call: Call) -> str:
    own, groups = call["input"], call.number("num_groups", 1)
    return "" if own.dim() > 1 and groups >= 1 and own.shape[1] % groups == 0 else f"gives {groups} groups"


def _typed_view(call: Call) -> str:
    """A bool is a byte of 0 or 1: kernels would miscount other bytes."""
    changed = call["dtype"] != call["self"].dtype
    return "reinterprets other bytes as bool" if changed and torch.bool in (call["dtype"], call["self"].dtype) else ""


SHAPES: Final[dict[str, Callable[[Call], str]]] = {
    "_weight_norm": _weight_norm,
    "native_group_norm": _native_group_norm,
    "group_norm": _group_norm,
    "view.dtype": _typed_view,
}
