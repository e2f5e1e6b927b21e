"""Building blocks of the memory rules: shapes after broadcasting, and bytes per element."""

import math
from collections.abc import Callable, Sequence

import torch

from ravnest.graph.operators.calls import Call


def element_bytes(call: Call) -> int:
    """Bytes per element of a result: those of the largest type involved. Integers may become 64 bits wide."""
    most = 4
    for tensor in call.tensors():
        most = max(most, tensor.element_size() if tensor.is_floating_point() or tensor.is_complex() else 8)
    dtype = call["dtype"]
    return max(most, dtype.itemsize) if isinstance(dtype, torch.dtype) else most


def common_elements(call: Call) -> int:
    """Number of elements of the shape that the call's tensors broadcast to."""
    return broadcast_elements([t.shape for t in call.tensors()])


def broadcast_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Number of elements of the shape that these shapes broadcast to. If they do not broadcast, that of the largest
    one: torch then refuses them, or uses each on its own."""
    largest = max((math.prod(s) for s in shapes), default=0)
    count = 1
    for place in range(1, max((len(s) for s in shapes), default=0) + 1):
        sizes = {s[-place] for s in shapes if len(s) >= place} - {1}
        if len(sizes) > 1:
            return largest
        count *= sizes.pop() if sizes else 1
    return max(count, largest) if shapes else 0


def own_three_times(call: Call) -> int:
    """Rule for operators that make three values of the first argument's size, whatever the other sizes."""
    return int(3 * call.first().numel() * max(call.first().element_size(), 4))


def times(factor: int) -> Callable[[Call], int]:
    """Rule for operators that make `factor` values of the broadcast size, including intermediate ones."""
    return lambda call: factor * common_elements(call) * max(element_bytes(call), 4)


def copy_bytes(call: Call) -> int:
    """Rule for results with as many elements as the first argument."""
    own = call.first()
    if isinstance(own, list | tuple):
        return all_bytes(call)
    dtype = call["dtype"]
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else own.element_size()
    other = call["other"]
    if isinstance(other, torch.Tensor):
        size = max(size, other.element_size())
    return int(own.numel() * max(size, own.element_size()))


def all_bytes(call: Call) -> int:
    return sum(t.numel() for t in call.tensors()) * max((t.element_size() for t in call.tensors()), default=0)


def spatial_sizes(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Output sizes, rounded up, of a window that moves over these sizes."""
    return [
        max(0, -(-(size + 2 * p - d * (k - 1) - 1) // s) + 1)
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
