"""Memory of operators whose arguments give the shape of the result: factories, repetitions, padding and parts."""

import math
from collections.abc import Callable
from typing import Final

import torch

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import copy_bytes, element_bytes

_OBJECT_BYTES: Final = 1024


def nothing(call: Call) -> int:
    return 0


def shaped(name: str) -> Callable[[Call], int]:
    """Rule for operators whose result has the shape in this argument."""

    def rule(call: Call) -> int:
        shape = call[name]
        sizes = [shape] if isinstance(shape, int) else list(shape or [])
        if any(s < 0 for s in sizes):
            raise ValueError(f"{name} has a negative size")
        return math.prod(sizes) * max(8, element_bytes(call))

    return rule


def counted(*names: str) -> Callable[[Call], int]:
    """Rule for operators whose number of elements is the product of these arguments."""
    return lambda call: math.prod(max(0, call.number(n, 0)) for n in names) * 8


def eye(call: Call) -> int:
    n = max(0, call.number("n", 0))
    return n * max(0, call.number("m", n)) * 8


def arange(call: Call) -> int:
    start, end, step = call["start"] or 0, call["end"], call["step"] or 1
    count = (end - start) / step
    if not math.isfinite(count):
        raise ValueError("start, end and step do not form a range")
    return int(max(0, math.ceil(count)) * 8)


def triangle_indices(call: Call) -> int:
    return max(0, call.number("row", 0)) * max(0, call.number("col", 0)) * 32


def repeat(call: Call) -> int:
    own, repeats = call.first(), call["repeats"] if call["repeats"] is not None else call["dims"]
    counts = [repeats] if isinstance(repeats, int) else list(repeats)
    if any(c < 0 for c in counts):
        raise ValueError("the number of repetitions is negative")
    return int(2 * own.numel() * math.prod(counts) * own.element_size())


def repeat_interleave(call: Call) -> int:
    repeats, own, dim = call["repeats"], call["self"], call["dim"]
    if isinstance(repeats, torch.Tensor) and (repeats.is_floating_point() or repeats.is_complex()):
        raise ValueError("the number of repetitions is not an integer")
    places = 1 if own is None else own.numel() if dim is None else own.shape[dim]
    if not isinstance(repeats, torch.Tensor):
        times = max(0, repeats) * places
    elif not repeats.numel():
        times = 0
    else:
        # The sum is computed in floating point, where it cannot overflow to a small number.
        times = int(min(2.0**62, float(repeats.double().clamp(min=0).sum())))
        times *= places if repeats.numel() == 1 else 1
    if call["output_size"] not in (None, times):
        # The kernel allocates output_size before it finds that the result has another size.
        raise ValueError(f"the result has {times} elements, but output_size is {call['output_size']}")
    if own is None:
        return int(times * 16)
    each = 1 if dim is None else own.numel() // max(1, own.shape[dim])
    copies = 1 if isinstance(repeats, torch.Tensor) else 2
    return int(times * (copies * each * own.element_size() + 16) + own.numel() * own.element_size())


def pad(call: Call) -> int:
    own = call.first()
    pads = list(call["pad"] if call["pad"] is not None else call["padding"])
    if len(pads) % 2 or len(pads) > 2 * own.dim():
        raise ValueError("the padding does not fit the dimensions")
    sizes = list(own.shape)
    for place in range(len(pads) // 2):
        sizes[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    if any(s < 0 for s in sizes):
        raise ValueError("the negative padding is larger than the input")
    return int(2 * math.prod(sizes) * own.element_size())


def diagonal_matrix(call: Call) -> int:
    own = call.first()
    if call.short_name == "diag" and own.dim() != 1:
        return copy_bytes(call)
    length = (own.shape[-1] if own.dim() else 1) + abs(call.number("diagonal", 0)) + abs(call.number("offset", 0))
    return int(own.numel() // max(1, own.shape[-1] if own.dim() else 1) * length * length * own.element_size())


def block_diagonal(call: Call) -> int:
    shapes = [(t.shape[-2] if t.dim() > 1 else 1, t.shape[-1] if t.dim() else 1) for t in call.tensors()]
    return 2 * sum(r for r, _ in shapes) * sum(c for _, c in shapes) * element_bytes(call)


def parts(call: Call) -> int:
    own, dim = call.first(), call.number("dim", 0)
    length = own.shape[dim] if own.dim() else 1
    if call.short_name == "unbind":
        count = length
    elif call.short_name in ("chunk", "tensor_split"):
        given = call["chunks"] if call.short_name == "chunk" else call["sections"]
        split = call["indices"]
        count = given if given is not None else len(split) + 1 if split is not None else _max_parts(call)
        count = min(count, length) if call.short_name == "chunk" else count
    else:
        each = call["split_size"] if call["split_size"] is not None else call["split_sizes"]
        count = len(each) if isinstance(each, list | tuple) else -(-length // max(1, each))
    return max(0, int(count)) * _OBJECT_BYTES


def _max_parts(call: Call) -> int:
    given = call["tensor_indices_or_sections"]
    return int(given) if given.dim() == 0 else given.numel() + 1
