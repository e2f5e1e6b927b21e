"""Parts of the rules for sizes: what broadcasts to what, and how many bytes an element has."""

import math
from collections.abc import Callable, Sequence

import torch

from ravnest.graph.operators.calls import Call


def element_bytes(call: Call) -> int:
    """Of a result: that of the largest type involved. Whole numbers may become numbers of 64 bits."""
    most = 4
    for tensor in call.tensors():
        most = max(most, tensor.element_size() if tensor.is_floating_point() or tensor.is_complex() else 8)
    dtype = call["dtype"]
    return max(most, dtype.itemsize) if isinstance(dtype, torch.dtype) else most


def common_elements(call: Call) -> int:
    """Elements of what the tensors broadcast to; where they do not, torch refuses them or uses each by itself."""
    return broadcast_elements([t.shape for t in call.tensors()])


def broadcast_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of what these shapes broadcast to; of the largest where they do not: torch then refuses them, or uses
    each by itself."""
    largest = max((math.prod(s) for s in shapes), default=0)
    count = 1
    for place in range(1, max((len(s) for s in shapes), default=0) + 1):
        sizes = {s[-place] for s in shapes if len(s) >= place} - {1}
        if len(sizes) > 1:
            return largest
        count *= sizes.pop() if sizes else 1
    return max(count, largest) if shapes else 0


def own_times(factor: int) -> Callable[[Call], int]:
    """Operators that make that many values of the first argument's size, whatever sizes the others have."""
    return lambda call: int(factor * call.first().numel() * max(call.first().element_size(), 4))


def times(factor: int) -> Callable[[Call], int]:
    """Operators that make that many values of the common size, their intermediate ones included."""
    return lambda call: factor * common_elements(call) * max(element_bytes(call), 4)


def copy_bytes(call: Call) -> int:
    """Results that have as many elements as the first argument."""
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
    """Sizes of what a window yields that goes over these sizes, rounded up."""
    return [
        max(0, -(-(size + 2 * p - d * (k - 1) - 1) // s) + 1)
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
