"""Memory of products: matrices, contractions, attention and recurrent layers."""

import math
from collections.abc import Callable, Sequence

import torch

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import all_bytes, broadcast_elements, element_bytes


def _matmul(a: Sequence[int], b: Sequence[int], size: int) -> int:
    """Includes the copies of one factor for each matrix of a batch of the other."""
    if not a or not b:
        return 0
    rows, columns = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1)
    batch = broadcast_elements([a[:-2], b[:-2]]) if len(a) > 2 or len(b) > 2 else 1
    copies = batch * (rows * a[-1] + a[-1] * columns)
    return (batch * rows * columns + copies) * size


def product(first: str, second: str) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        a, b = call[first], call[second]
        size = max(4, a.element_size(), b.element_size())
        added = call["self"] if first != "self" else call["bias"]
        more = added.numel() * size if isinstance(added, torch.Tensor) else 0
        return _matmul(a.shape, b.shape, size) + more

    return rule


def linear(call: Call) -> int:
    a, weight = call["input"], call["weight"]
    rows = weight.shape[0] if weight.dim() > 1 else 1
    result = math.prod(a.shape[:-1]) * rows
    return int((result + a.numel() + weight.numel()) * max(4, a.element_size(), weight.element_size()))


def bilinear(call: Call) -> int:
    a, b, weight = call["input1"], call["input2"], call["weight"]
    if weight.dim() != 3:
        raise ValueError("the weight of bilinear has three dimensions")
    rows = math.prod(a.shape[:-1])
    return int(
        rows * (weight.shape[0] * (2 + b.shape[-1] if b.dim() else 1) + sum(weight.shape)) * 8 + weight.numel() * 8
    )


def outer(call: Call) -> int:
    tensors = list(call.tensors())
    return 2 * tensors[-1].numel() * tensors[-2].numel() * element_bytes(call) + all_bytes(call)


def inner(call: Call) -> int:
    a, b = call["self"], call["other"]
    if not a.dim() or not b.dim():
        return outer(call)
    rows, columns = int(a.numel()) // max(1, a.shape[-1]), int(b.numel()) // max(1, b.shape[-1])
    return int(rows * columns * element_bytes(call) + 2 * all_bytes(call))


def tensordot(call: Call) -> int:
    a, b = call["self"], call["other"]
    left = math.prod(s for i, s in enumerate(a.shape) if i not in {d % a.dim() for d in call["dims_self"]})
    right = math.prod(s for i, s in enumerate(b.shape) if i not in {d % b.dim() for d in call["dims_other"]})
    return int(left * right * element_bytes(call) + 2 * all_bytes(call))


def einsum(call: Call) -> int:
    """The result and the intermediate ones: operands are multiplied two by two, and a letter is summed as soon as no
    later operand has it."""
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    terms, tensors = left.split(","), call["tensors"]
    if len(terms) != len(tensors):
        raise ValueError("einsum has a different number of operands than its equation")
    sizes: dict[str, int] = {}
    letters = []
    for term, tensor in zip(terms, tensors, strict=True):
        named = term.replace("...", "")
        free = tensor.dim() - len(named)
        if free < 0 or (free and "..." not in term):
            raise ValueError("einsum has an operand with a different number of dimensions than its equation")
        before = term.split("...")[0] if "..." in term else term
        dots = [f".{place}" for place in range(free, 0, -1)]
        spread = [*before, *dots, *named[len(before) :]]
        for letter, size in zip(spread, tensor.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
        letters.append(set(spread))
    dotted = {letter for letter in sizes if letter.startswith(".")}
    plain = left.replace(",", "").replace(".", "")
    kept = set(right.replace(".", "")) if arrow else {letter for letter in plain if plain.count(letter) == 1}
    kept |= dotted
    path = list(call["path"] or [])
    total = 0
    while len(letters) > 1:
        pair = sorted((path.pop(0), path.pop(0))) if len(path) > 1 else [0, 1]
        if not 0 <= pair[0] < pair[1] < len(letters):
            raise ValueError("einsum has an invalid path")
        second, first = letters.pop(pair[1]), letters.pop(pair[0])
        later = kept.union(*letters) if letters else kept
        joined = (first | second) & later
        shared = {letter for letter in first & second if letter in later}
        copies = math.prod(sizes[x] for x in shared | first) + math.prod(sizes[x] for x in shared | second)
        total += math.prod(sizes[letter] for letter in joined) + copies
        letters.append(joined) if path else letters.insert(0, joined)
    return int((total + sum(t.numel() for t in tensors)) * element_bytes(call))


def kron(call: Call) -> int:
    return int(3 * call["self"].numel() * call["other"].numel() * element_bytes(call))


def cdist(call: Call) -> int:
    a, b = call["x1"], call["x2"]
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError("cdist takes tensors of two dimensions or more")
    batch = broadcast_elements([a.shape[:-2], b.shape[:-2]]) if a.dim() > 2 or b.dim() > 2 else 1
    width = a.shape[-1] + 2
    return int(batch * (2 * a.shape[-2] * b.shape[-2] + 3 * width * (a.shape[-2] + b.shape[-2])) * element_bytes(call))


def attention(call: Call) -> int:
    query, key, value = call["query"], call["key"], call["value"]
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError("attention takes tensors of two dimensions or more")
    batch = broadcast_elements([t.shape[:-2] for t in (query, key, value)])
    size = max(4, query.element_size())
    result = batch * query.shape[-2] * value.shape[-1]
    total = 2 * result + query.numel() + 2 * key.numel() + 2 * value.numel()
    if not _is_fused(call):
        total += 3 * batch * query.shape[-2] * key.shape[-2]
    return int(total * size)


def _is_fused(call: Call) -> bool:
    """Whether torch uses a kernel that never holds all attention weights at once."""
    try:
        chosen = torch._fused_sdp_choice(
            call["query"],
            call["key"],
            call["value"],
            call["attn_mask"],
            call["dropout_p"] or 0.0,
            bool(call["is_causal"]),
            scale=call["scale"],
            enable_gqa=bool(call["enable_gqa"]),
        )
    except (RuntimeError, TypeError, ValueError):
        return False
    return int(chosen) != 0


def recurrent(call: Call) -> int:
    own = call["input"] if call["input"] is not None else call["data"]
    params = call["params"]
    hidden = params[1].shape[-1] if len(params) > 1 and params[1].dim() else 1
    rows = params[0].shape[0] if params and params[0].dim() else 1
    steps = own.numel() // max(1, own.shape[-1] if own.dim() else 1)
    directions = 2 if call["bidirectional"] else 1
    layers = max(1, call.number("num_layers", 1)) * directions
    each = 2 * rows + 8 * hidden
    return int(
        (steps * layers * each + 2 * own.numel() + 2 * sum(p.numel() for p in params)) * max(4, own.element_size())
    )


def solved(call: Call) -> int:
    """A system of equations for each of a batch, with copies of both sides."""
    return 3 * _matmul(call["A"].shape, call["self"].shape, element_bytes(call))
