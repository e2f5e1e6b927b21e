"""Memory of operators with indices: embeddings, indexing, scattering, counting and sorting."""

import math

import torch

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import (
    all_bytes,
    broadcast_elements,
    common_elements,
    copy_bytes,
    element_bytes,
)


def embedding(call: Call) -> int:
    weight, indices = call["weight"], call["indices"]
    width = math.prod(weight.shape[1:])
    return int(indices.numel() * width * weight.element_size())


def embedding_bag(call: Call) -> int:
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    width = math.prod(weight.shape[1:])
    bags = indices.shape[0] if indices.dim() == 2 else offsets.numel()
    return int((bags + 1) * width * (weight.element_size() + 8) + 8 * (4 * indices.numel() + 4 * bags) + indices.nbytes)


def index_select(call: Call) -> int:
    own, dim, index = call["self"], call.number("dim", 0), call["index"]
    width = own.shape[dim] if own.dim() else 1
    return int(own.numel() // max(1, width) * index.numel() * own.element_size())


def gather(call: Call) -> int:
    own, index = call["self"], call["index"] if call["index"] is not None else call["indices"]
    if call.short_name == "take_along_dim":
        return int(4 * common_elements(call) * max(8, own.element_size()))
    return int(index.numel() * own.element_size())


def scatter(call: Call) -> int:
    return copy_bytes(call) * 2 + all_bytes(call)


def index(call: Call) -> int:
    own, indices = call["self"], [i for i in call["indices"] if i is not None]
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    whole = [i for i in indices if i.dtype not in (torch.bool, torch.uint8)]
    used = len(whole) + sum(m.dim() for m in masks)
    if used > own.dim():
        raise ValueError("there are more indices than dimensions")
    picked = broadcast_elements([*(i.shape for i in whole), *((m.numel(),) for m in masks)])
    # The size of the result depends on which dimensions are indexed; the largest ones may remain.
    rest = math.prod(sorted(own.shape)[used:]) if used else own.numel()
    converted = sum(8 * i.numel() for i in whole) + sum(24 * m.numel() * max(1, m.dim()) for m in masks)
    return int(picked * rest * own.element_size() + converted)


def index_put(call: Call) -> int:
    values = call["values"]
    copies = call["self"].nbytes if call.short_name == "index_put" else 0
    return int(copies + 2 * index(call) + values.nbytes * 2 + 16 * values.numel())


def one_hot(call: Call) -> int:
    own, classes = call.first(), call.number("num_classes", -1)
    if classes < 0 and own.numel():
        classes = int(own.max()) + 1
    return int(own.numel() * max(0, classes) * 8)


def bincount(call: Call) -> int:
    own = call.first()
    count = int(own.max()) + 1 if own.numel() and not own.is_floating_point() else 0
    return int(max(count, call.number("minlength", 0)) * 8 + own.numel() * 8)


def multinomial(call: Call) -> int:
    own = call.first()
    rows = own.shape[0] if own.dim() == 2 else 1
    return int(rows * max(0, call.number("num_samples", 0)) * 8 + own.numel() * 24)


def quantile(call: Call) -> int:
    own, q = call.first(), call["q"]
    count = q.numel() if isinstance(q, torch.Tensor) else 1
    dim = call["dim"]
    rest = 1 if dim is None or not own.dim() else own.numel() // max(1, own.shape[dim])
    return int(own.numel() * (2 * own.element_size() + 8) + 8 * count * rest * 8)


def sorted_bytes(call: Call) -> int:
    return 2 * common_elements(call) * (8 + element_bytes(call))


def ctc(call: Call) -> int:
    own, targets = call["log_probs"], call["targets"]
    steps = own.shape[0] if own.dim() else 1
    batch = own.shape[1] if own.dim() > 2 else 1
    longest = targets.shape[-1] if targets.dim() else 1
    return int(batch * steps * (2 * longest + 1) * 8 + 4 * own.nbytes + 2 * targets.nbytes)


def searched(call: Call) -> int:
    """Positions of values in a sorted sequence, of which the kernel makes a contiguous copy."""
    places = call["self"].numel() if isinstance(call["self"], torch.Tensor) else 1
    return 8 * places + 2 * all_bytes(call)


def sampled(call: Call) -> int:
    """One value for each channel and point of the grid."""
    own, grid = call["input"], call["grid"]
    if own.dim() < 4 or grid.dim() != own.dim():
        raise ValueError("the input and the grid have different numbers of dimensions")
    points = math.prod(grid.shape[1:-1])
    return int(own.shape[0] * own.shape[1] * points * own.element_size() + own.nbytes + grid.nbytes)


def compared(call: Call) -> int:
    """A loss over pairs, with a target for each pair."""
    pairs = broadcast_elements([call["input1"].shape, call["input2"].shape])
    targets = broadcast_elements([call["target"].shape, call["input1"].shape[:-1], call["input2"].shape[:-1]])
    return 6 * (pairs + targets) * element_bytes(call)


def places_of_true(call: Call) -> int:
    """Indices of non-zero elements, one for each dimension; with two values to choose from, the chosen values."""
    own = call["self" if call.short_name == "nonzero" else "condition"]
    if call.short_name == "where" and len(list(call.tensors())) + isinstance(call["self"], int | float) > 1:
        return common_elements(call) * element_bytes(call)
    return int(own.numel() * max(1, own.dim()) * 8 + own.dim() * 1024)
