"""Guards of losses whose kernels use labels and lengths as memory offsets."""

from collections.abc import Callable
from typing import Final

import torch

from ravnest.graph.operators.calls import Call

_WHOLE: Final = (torch.int32, torch.int64)


def _ctc_shapes(call: Call) -> str:
    own, targets = call["log_probs"], call["targets"]
    if own.dim() not in (2, 3) or 0 in own.shape or not own.is_floating_point():
        return f"gives scores of shape {tuple(own.shape)}"
    if targets.dim() not in (1, 2) or targets.dtype not in _WHOLE:
        return f"gives labels of {targets.dim()} dimensions and type {targets.dtype}"
    if not 0 <= call.number("blank", 0) < own.shape[-1]:
        return "gives a blank that is not a class"
    batch = own.shape[1] if own.dim() == 3 else 1
    if targets.dim() == 2 and targets.shape[0] != batch:
        return "gives labels of another batch size"
    for name in ("input_lengths", "target_lengths"):
        given = call[name]
        if isinstance(given, torch.Tensor):
            if given.dtype not in _WHOLE or given.dim() > 1 or given.numel() != batch:
                return f"gives {name} that are not one integer for each sample"
        elif len(given) != batch:
            return f"gives {len(given)} {name} for {batch} samples"
    return ""


def _ctc_values(call: Call) -> str:
    """Checks labels and lengths; padding after a sample's last label may have any value."""
    reason = _ctc_shapes(call)
    if reason:
        return reason
    own, targets = call["log_probs"], call["targets"]
    fed, lengths = (_whole(call[name]) for name in ("input_lengths", "target_lengths"))
    if any(not 0 <= length <= own.shape[0] for length in fed):
        return f"gives lengths of the input beyond its {own.shape[0]} steps"
    if min(lengths) < 0:
        return "gives a length below 0"
    if targets.dim() == 2:
        if max(lengths) > targets.shape[1]:
            return f"gives lengths beyond the {targets.shape[1]} labels"
        used = (
            torch.arange(targets.shape[1], device=targets.device)
            < torch.tensor(lengths, device=targets.device)[:, None]
        )
        labels = targets[used]
    else:
        if sum(lengths) > targets.numel():
            return f"gives lengths of {sum(lengths)} labels together, of {targets.numel()}"
        labels = targets[: sum(lengths)]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < own.shape[-1]:
        return f"gives labels outside the {own.shape[-1]} classes"
    return ""


def _whole(given: torch.Tensor | list[int]) -> list[int]:
    return [int(n) for n in given.flatten().tolist()] if isinstance(given, torch.Tensor) else list(given)


def _spreads(weight: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether the weight can be expanded to the shape of the other tensor."""
    sizes = zip(reversed(weight.shape), reversed(own.shape), strict=False)
    return weight.dim() <= own.dim() and all(size in (1, wanted) for size, wanted in sizes)


def _pairs(call: Call) -> str:
    """Checks that there is one target for each value, as torch's Python layer does."""
    own, target, weight = call["self"], call["target"], call["weight"]
    if own.shape != target.shape:
        return f"gives targets of shape {tuple(target.shape)} for values of shape {tuple(own.shape)}"
    if weight is not None and not _spreads(weight, own):
        return f"gives weights of shape {tuple(weight.shape)} for values of shape {tuple(own.shape)}"
    return ""


SHAPES: Final[dict[str, Callable[[Call], str]]] = {"binary_cross_entropy": _pairs}
VALUES: Final[dict[str, Callable[[Call], str]]] = {"ctc_loss": _ctc_values}
