"""Guards of attention: the fused kernels check only some of the sizes of queries, keys and values."""

from collections.abc import Callable, Sequence
from typing import Final

from ravnest.graph.operators.calls import Call


def _attention(call: Call) -> str:
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    tensors = (query, key, value)
    dimensions = max(t.dim() for t in tensors)
    if min(t.dim() for t in tensors) < 2:
        return "gives queries, keys or values of fewer than two dimensions"
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        return f"gives queries, keys and values of incompatible shapes, {shapes}"
    if not 0 <= (call["dropout_p"] or 0.0) <= 1:
        return "gives a dropout probability that is not between 0 and 1"
    batches = [[1] * (dimensions - t.dim()) + [*t.shape[:-2]] for t in tensors]
    together = [max(sizes) for sizes in zip(*batches, strict=True)]
    if call["enable_gqa"]:
        if dimensions < 3 or len({t.dim() for t in tensors}) > 1:
            return "groups queries that have no heads"
        heads = [batch.pop() for batch in batches]
        if min(heads) < 1 or heads[1] != heads[2] or heads[0] % heads[1]:
            return f"gives {heads[0]} heads of queries for {heads[1]} of keys and {heads[2]} of values"
    if any(not _spreads(batch, other) for batch in batches for other in batches):
        return "gives queries, keys and values of different batches"
    if mask is not None:
        sizes = (*together, query.shape[-2], key.shape[-2])
        if mask.dim() > len(sizes) or not all(m in (1, s) for m, s in zip(mask.shape[::-1], sizes[::-1], strict=False)):
            return f"gives a mask of shape {tuple(mask.shape)} for {sizes}"
    return ""


def _spreads(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))


SHAPES: Final[dict[str, Callable[[Call], str]]] = {"scaled_dot_product_attention": _attention}
