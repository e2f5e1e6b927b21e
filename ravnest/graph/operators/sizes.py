"""How many bytes a call may take, before it is made: its results and what its kernel needs meanwhile.

A graph of ten nodes can ask for more memory than there is. So what a call makes is computed first, from the shapes of
what it is given. The figures are upper bounds: exact for the results of most operators, with room for a kernel's own
buffers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ravnest.graph.operators.calls import Call

_OBJECT_BYTES: Final = 1024
"""About what a tensor takes beside its memory."""


def call_bytes(call: Call) -> int:
    """An upper bound of what the call takes anew; ValueError where its arguments are nonsense."""
    rule = _RULES.get(call.short_name)
    if rule is not None:
        return rule(call)
    return _common_elements(call) * _element_bytes(call)


def logical_bytes(value: Any) -> int:
    """What a result would take if each of its elements had memory of its own: most later kernels go over, or make,
    that many."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return max((logical_bytes(v) for v in value), default=0) if isinstance(value, tuple | list) else 0


def _element_bytes(call: Call) -> int:
    """Of a result: that of the largest type involved. Whole numbers may become numbers of 64 bits."""
    most = 4
    for tensor in call.tensors():
        most = max(most, tensor.element_size() if tensor.is_floating_point() or tensor.is_complex() else 8)
    dtype = call["dtype"]
    return max(most, dtype.itemsize) if isinstance(dtype, torch.dtype) else most


def _common_elements(call: Call) -> int:
    """Elements of what the tensors broadcast to; where they do not, torch refuses them or uses each by itself."""
    return _broadcast([t.shape for t in call.tensors()])


def _broadcast(shapes: Sequence[Sequence[int]]) -> int:
    count = 1
    for place in range(1, max((len(s) for s in shapes), default=0) + 1):
        sizes = [s[-place] for s in shapes if len(s) >= place]
        count *= 0 if 0 in sizes and max(sizes) <= 1 else max(sizes)
    return max(count, *(math.prod(s) for s in shapes)) if shapes else 0


def _times(factor: int) -> Callable[[Call], int]:
    """Operators that make that many values of the common size, their intermediate ones included."""
    return lambda call: factor * _common_elements(call) * max(_element_bytes(call), 4)


def _nothing(call: Call) -> int:
    return 0


def _copy(call: Call) -> int:
    """Results that have as many elements as the first argument."""
    own = call.first()
    if isinstance(own, list | tuple):
        return _sum(call)
    dtype = call["dtype"]
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else own.element_size()
    other = call["other"]
    if isinstance(other, torch.Tensor):
        size = max(size, other.element_size())
    return int(own.numel() * max(size, own.element_size()))


def _sum(call: Call) -> int:
    return sum(t.numel() for t in call.tensors()) * max((t.element_size() for t in call.tensors()), default=0)


def _shaped(name: str) -> Callable[[Call], int]:
    """Operators whose result has the shape in that argument."""

    def rule(call: Call) -> int:
        shape = call[name]
        sizes = [shape] if isinstance(shape, int) else list(shape or [])
        if any(s < 0 for s in sizes):
            raise ValueError(f"{name} has a size below zero")
        return math.prod(sizes) * max(8, _element_bytes(call))

    return rule


def _counted(*names: str) -> Callable[[Call], int]:
    """Operators whose result has as many elements as these arguments say, multiplied."""
    return lambda call: math.prod(max(0, call.number(n, 0)) for n in names) * 8


def _eye(call: Call) -> int:
    n = max(0, call.number("n", 0))
    return n * max(0, call.number("m", n)) * 8


def _arange(call: Call) -> int:
    start, end, step = call["start"] or 0, call["end"], call["step"] or 1
    count = (end - start) / step
    if not math.isfinite(count):
        raise ValueError("start, end and step do not make a range")
    return int(max(0, math.ceil(count)) * 8)


def _indices(call: Call) -> int:
    return max(0, call.number("row", 0)) * max(0, call.number("col", 0)) * 32


def _matmul(a: Sequence[int], b: Sequence[int], size: int) -> int:
    """Also where one of the two is copied for each of a batch of the other."""
    if not a or not b:
        return 0
    rows, columns = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1)
    batch = _broadcast([a[:-2], b[:-2]]) if len(a) > 2 or len(b) > 2 else 1
    copies = batch * (rows * a[-1] + a[-1] * columns)
    return (batch * rows * columns + copies) * size


def _product(first: str, second: str) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        a, b = call[first], call[second]
        size = max(4, a.element_size(), b.element_size())
        added = call["self"] if first != "self" else call["bias"]
        more = added.numel() * size if isinstance(added, torch.Tensor) else 0
        return _matmul(a.shape, b.shape, size) + more

    return rule


def _linear(call: Call) -> int:
    a, weight = call["input"], call["weight"]
    rows = weight.shape[0] if weight.dim() > 1 else 1
    result = math.prod(a.shape[:-1]) * rows
    return int((result + a.numel() + weight.numel()) * max(4, a.element_size(), weight.element_size()))


def _bilinear(call: Call) -> int:
    a, b, weight = call["input1"], call["input2"], call["weight"]
    if weight.dim() != 3:
        raise ValueError("the weight of bilinear has three dimensions")
    rows = math.prod(a.shape[:-1])
    return int(
        rows * (weight.shape[0] * (2 + b.shape[-1] if b.dim() else 1) + sum(weight.shape)) * 8 + weight.numel() * 8
    )


def _outer(call: Call) -> int:
    tensors = list(call.tensors())
    return 2 * tensors[-1].numel() * tensors[-2].numel() * _element_bytes(call) + _sum(call)


def _inner(call: Call) -> int:
    a, b = call["self"], call["other"]
    if not a.dim() or not b.dim():
        return _outer(call)
    rows, columns = int(a.numel()) // max(1, a.shape[-1]), int(b.numel()) // max(1, b.shape[-1])
    return int(rows * columns * _element_bytes(call) + 2 * _sum(call))


def _tensordot(call: Call) -> int:
    a, b = call["self"], call["other"]
    left = math.prod(s for i, s in enumerate(a.shape) if i not in {d % a.dim() for d in call["dims_self"]})
    right = math.prod(s for i, s in enumerate(b.shape) if i not in {d % b.dim() for d in call["dims_other"]})
    return int(left * right * _element_bytes(call) + 2 * _sum(call))


def _einsum(call: Call) -> int:
    """The result, and what is made on the way to it: operands are joined two by two, and a letter is summed as soon as
    no later operand has it."""
    left, arrow, right = str(call["equation"]).replace(" ", "").partition("->")
    terms, tensors = left.split(","), call["tensors"]
    if len(terms) != len(tensors):
        raise ValueError("einsum has another number of operands than its equation")
    sizes: dict[str, int] = {}
    letters = []
    for term, tensor in zip(terms, tensors, strict=True):
        named = term.replace("...", "")
        free = tensor.dim() - len(named)
        if free < 0 or (free and "..." not in term):
            raise ValueError("einsum has an operand with another number of dimensions than its equation")
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
            raise ValueError("einsum has a path that leads nowhere")
        second, first = letters.pop(pair[1]), letters.pop(pair[0])
        later = kept.union(*letters) if letters else kept
        joined = (first | second) & later
        shared = {letter for letter in first & second if letter in later}
        copies = math.prod(sizes[x] for x in shared | first) + math.prod(sizes[x] for x in shared | second)
        total += math.prod(sizes[letter] for letter in joined) + copies
        letters.append(joined) if path else letters.insert(0, joined)
    return int((total + sum(t.numel() for t in tensors)) * _element_bytes(call))


def _kron(call: Call) -> int:
    return int(3 * call["self"].numel() * call["other"].numel() * _element_bytes(call))


def _cdist(call: Call) -> int:
    a, b = call["x1"], call["x2"]
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError("cdist takes tensors of two dimensions or more")
    batch = _broadcast([a.shape[:-2], b.shape[:-2]]) if a.dim() > 2 or b.dim() > 2 else 1
    width = a.shape[-1] + 2
    return int(batch * (2 * a.shape[-2] * b.shape[-2] + 3 * width * (a.shape[-2] + b.shape[-2])) * _element_bytes(call))


def _repeat(call: Call) -> int:
    own, repeats = call.first(), call["repeats"] if call["repeats"] is not None else call["dims"]
    counts = [repeats] if isinstance(repeats, int) else list(repeats)
    if any(c < 0 for c in counts):
        raise ValueError("something is repeated less than no times")
    return int(2 * own.numel() * math.prod(counts) * own.element_size())


def _repeat_interleave(call: Call) -> int:
    repeats, own, dim = call["repeats"], call["self"], call["dim"]
    if not isinstance(repeats, torch.Tensor):
        return int((own.numel() * max(0, repeats)) * (own.element_size() + 8) * 2)
    if repeats.is_floating_point() or repeats.is_complex():
        raise ValueError("how often something is repeated is a whole number")
    # In floating point, where a sum of large numbers stays large.
    times = int(min(2.0**62, float(repeats.double().clamp(min=0).sum()))) if repeats.numel() else 0
    if own is None:
        return times * 16
    each = own.numel() if dim is None else own.numel() // max(1, own.shape[dim])
    if repeats.numel() == 1:
        times *= max(1, own.numel() if dim is None else own.shape[dim])
    return int(times * ((1 if dim is None else each) * own.element_size() + 16) + own.numel() * own.element_size())


def _pad(call: Call) -> int:
    own = call.first()
    pads = list(call["pad"] if call["pad"] is not None else call["padding"])
    if len(pads) % 2 or len(pads) > 2 * own.dim():
        raise ValueError("the padding does not fit the dimensions")
    sizes = list(own.shape)
    for place in range(len(pads) // 2):
        sizes[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    if any(s < 0 for s in sizes):
        raise ValueError("the padding takes more away than there is")
    return int(2 * math.prod(sizes) * own.element_size())


def _diagonal_matrix(call: Call) -> int:
    own = call.first()
    if call.short_name == "diag" and own.dim() != 1:
        return _copy(call)
    length = (own.shape[-1] if own.dim() else 1) + abs(call.number("diagonal", 0)) + abs(call.number("offset", 0))
    return int(own.numel() // max(1, own.shape[-1] if own.dim() else 1) * length * length * own.element_size())


def _block_diagonal(call: Call) -> int:
    shapes = [(t.shape[-2] if t.dim() > 1 else 1, t.shape[-1] if t.dim() else 1) for t in call.tensors()]
    return 2 * sum(r for r, _ in shapes) * sum(c for _, c in shapes) * _element_bytes(call)


def spatial_sizes(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Sizes of what a window yields that goes over these sizes, rounded up."""
    return [
        max(0, -(-(size + 2 * p - d * (k - 1) - 1) // s) + 1)
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]


def _convolution(call: Call) -> int:
    own, weight = call["input"], call["weight"]
    count = weight.dim() - 2
    if count < 1 or own.dim() not in (count + 1, count + 2):
        raise ValueError("the input and the weight of a convolution have other numbers of dimensions")
    batch = own.shape[0] if own.dim() == count + 2 else 1
    kernel, sizes = list(weight.shape[2:]), list(own.shape[-count:])
    stride, dilation = call.numbers("stride", count, 1), call.numbers("dilation", count, 1)
    size = max(4, own.element_size())
    moved = call.short_name.startswith("conv_transpose") or bool(call["transposed"])
    if isinstance(call["padding"], str):
        padding = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    else:
        padding = call.numbers("padding", count, 0)
    if moved:
        extra = call.numbers("output_padding", count, 0)
        out = [
            max(0, (n - 1) * s - 2 * p + d * (k - 1) + e + 1)
            for n, s, p, d, k, e in zip(sizes, stride, padding, dilation, kernel, extra, strict=True)
        ]
        channels, columns = weight.shape[1] * call.number("groups", 1), math.prod(sizes)
    else:
        out = spatial_sizes(sizes, kernel, stride, padding, dilation)
        channels, columns = weight.shape[0], math.prod(out)
    padded = batch * own.shape[-count - 1] * math.prod(n + 2 * max(0, p) for n, p in zip(sizes, padding, strict=True))
    total = 2 * batch * channels * math.prod(out) + padded + 2 * weight.numel()
    if own.dtype is not torch.float32 or own.device.type != "cpu":
        # Kernels that lay each window out beside the others.
        total += (1 if own.device.type != "cpu" else batch) * own.shape[-count - 1] * math.prod(kernel) * columns
    else:
        total += own.shape[-count - 1] * math.prod(kernel) * columns if count == 3 else 0
    return int(total * size)


def _pool(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        kernel = call.numbers("kernel_size", count, 1)
        stride = kernel if not call["stride"] else call.numbers("stride", count, 1)
        padding, dilation = call.numbers("padding", count, 0), call.numbers("dilation", count, 1)
        if any(s < 1 for s in stride):
            raise ValueError("a stride is at least 1")
        out = spatial_sizes(own.shape[-count:], kernel, stride, padding, dilation)
        return int(int(math.prod(own.shape[:-count]) * math.prod(out) * (own.element_size() + 8) * 2) + own.nbytes)

    return rule


def _adaptive(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        return int(
            math.prod(own.shape[:-count])
            * math.prod(max(0, s) for s in call.numbers("output_size", count, 1))
            * (own.element_size() + 8)
        )

    return rule


def _upsample(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        scales = call["scale_factors"]
        if call["output_size"] is not None:
            out = math.prod(max(0, s) for s in call.numbers("output_size", count, 1))
        else:
            out = math.prod(int(max(0.0, n * s)) for n, s in zip(own.shape[-count:], scales or [], strict=True))
        return int(int(2 * math.prod(own.shape[:-count]) * out * max(4, own.element_size())) + own.nbytes)

    return rule


def _columns(call: Call) -> int:
    own = call.first()
    kernel, stride = call.numbers("kernel_size", 2, 1), call.numbers("stride", 2, 1)
    padding, dilation = call.numbers("padding", 2, 0), call.numbers("dilation", 2, 1)
    if call.short_name == "col2im":
        channels = own.shape[-2] // max(1, math.prod(kernel)) if own.dim() > 1 else 1
        batch = own.shape[0] if own.dim() > 2 else 1
        return int(
            int(batch * channels * math.prod(call.numbers("output_size", 2, 1)) * own.element_size()) + own.nbytes
        )
    out = spatial_sizes(own.shape[-2:], kernel, stride, padding, dilation)
    return int(math.prod(own.shape[:-2]) * math.prod(kernel) * math.prod(out) * own.element_size())


def _embedding(call: Call) -> int:
    weight, indices = call["weight"], call["indices"]
    width = math.prod(weight.shape[1:])
    return int(indices.numel() * width * weight.element_size())


def _embedding_bag(call: Call) -> int:
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    width = math.prod(weight.shape[1:])
    bags = indices.shape[0] if indices.dim() == 2 else offsets.numel()
    return int((bags + 1) * width * (weight.element_size() + 8) + 8 * (4 * indices.numel() + 4 * bags) + indices.nbytes)


def _index_select(call: Call) -> int:
    own, dim, index = call["self"], call.number("dim", 0), call["index"]
    width = own.shape[dim] if own.dim() else 1
    return int(own.numel() // max(1, width) * index.numel() * own.element_size())


def _gather(call: Call) -> int:
    own, index = call["self"], call["index"] if call["index"] is not None else call["indices"]
    if call.short_name == "take_along_dim":
        return int(4 * _common_elements(call) * max(8, own.element_size()))
    return int(index.numel() * own.element_size())


def _scatter(call: Call) -> int:
    return _copy(call) * 2 + _sum(call)


def _index(call: Call) -> int:
    own, indices = call["self"], [i for i in call["indices"] if i is not None]
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    whole = [i for i in indices if i.dtype not in (torch.bool, torch.uint8)]
    used = len(whole) + sum(m.dim() for m in masks)
    if used > own.dim():
        raise ValueError("there are more indices than dimensions")
    picked = _broadcast([*(i.shape for i in whole), *((m.numel(),) for m in masks)])
    # Which dimensions are picked from decides what is left; the largest may be.
    rest = math.prod(sorted(own.shape)[used:]) if used else own.numel()
    converted = sum(8 * i.numel() for i in whole) + sum(24 * m.numel() * max(1, m.dim()) for m in masks)
    return int(picked * rest * own.element_size() + converted)


def _index_put(call: Call) -> int:
    values = call["values"]
    copies = call["self"].nbytes if call.short_name == "index_put" else 0
    return int(copies + 2 * _index(call) + values.nbytes * 2 + 16 * values.numel())


def _one_hot(call: Call) -> int:
    own, classes = call.first(), call.number("num_classes", -1)
    if classes < 0 and own.numel():
        classes = int(own.max()) + 1
    return int(own.numel() * max(0, classes) * 8)


def _bincount(call: Call) -> int:
    own = call.first()
    most = int(own.max()) + 1 if own.numel() and not own.is_floating_point() else 0
    return int(max(most, call.number("minlength", 0)) * 8 + own.numel() * 8)


def _multinomial(call: Call) -> int:
    own = call.first()
    rows = own.shape[0] if own.dim() == 2 else 1
    return int(rows * max(0, call.number("num_samples", 0)) * 8 + own.numel() * 24)


def _quantile(call: Call) -> int:
    own, q = call.first(), call["q"]
    count = q.numel() if isinstance(q, torch.Tensor) else 1
    dim = call["dim"]
    rest = 1 if dim is None or not own.dim() else own.numel() // max(1, own.shape[dim])
    return int(own.numel() * (2 * own.element_size() + 8) + 8 * count * rest * 8)


def _attention(call: Call) -> int:
    query, key, value = call["query"], call["key"], call["value"]
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError("attention takes tensors of two dimensions or more")
    batch = _broadcast([t.shape[:-2] for t in (query, key, value)])
    size = max(4, query.element_size())
    result = batch * query.shape[-2] * value.shape[-1]
    total = 2 * result + query.numel() + 2 * key.numel() + 2 * value.numel()
    if not _is_fused(call):
        total += 3 * batch * query.shape[-2] * key.shape[-2]
    return int(total * size)


def _is_fused(call: Call) -> bool:
    """Whether a kernel is used that never holds the whole of the attention weights."""
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


def _recurrent(call: Call) -> int:
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


def _ctc(call: Call) -> int:
    own, targets = call["log_probs"], call["targets"]
    steps = own.shape[0] if own.dim() else 1
    batch = own.shape[1] if own.dim() > 2 else 1
    longest = targets.shape[-1] if targets.dim() else 1
    return int(batch * steps * (2 * longest + 1) * 8 + 4 * own.nbytes + 2 * targets.nbytes)


def _parts(call: Call) -> int:
    own, dim = call.first(), call.number("dim", 0)
    length = own.shape[dim] if own.dim() else 1
    if call.short_name == "unbind":
        count = length
    elif call.short_name in ("chunk", "tensor_split"):
        given = call["chunks"] if call.short_name == "chunk" else call["sections"]
        split = call["indices"]
        count = given if given is not None else len(split) + 1 if split is not None else _most_parts(call)
        count = min(count, length) if call.short_name == "chunk" else count
    else:
        each = call["split_size"] if call["split_size"] is not None else call["split_sizes"]
        count = len(each) if isinstance(each, list | tuple) else -(-length // max(1, each))
    return max(0, int(count)) * _OBJECT_BYTES


def _most_parts(call: Call) -> int:
    given = call["tensor_indices_or_sections"]
    return int(given) if given.dim() == 0 else given.numel() + 1


def _sorted(call: Call) -> int:
    return 2 * _common_elements(call) * (8 + _element_bytes(call))


_NO_MEMORY: Final = """
    alias broadcast_tensors broadcast_to detach detach_ diagonal expand expand_as lift_fresh mT matrix_H meshgrid
    moveaxis movedim numpy_T permute positive select slice squeeze squeeze_ swapaxes swapdims sym_numel sym_size t t_
    transpose transpose_ unflatten unfold unsqueeze unsqueeze_ view view_as
"""
_COPIES: Final = """
    atleast_1d atleast_2d atleast_3d channel_shuffle clone contiguous flatten flip fliplr flipud lift_fresh_copy
    narrow narrow_copy pixel_shuffle pixel_unshuffle reshape reshape_as roll rot90 to type_as
"""
_TWICE: Final = """
    batch_norm binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss glu group_norm instance_norm
    layer_norm max min aminmax native_group_norm native_layer_norm nll_loss nll_loss2d nll_loss_nd rms_norm rrelu
    huber_loss l1_loss mse_loss smooth_l1_loss linalg_vector_norm norm softplus std std_mean var var_mean prod
    _weight_norm nan_to_num logsumexp kl_div
"""
_SEVERAL_TIMES: Final = """
    alpha_dropout cosine_embedding_loss cosine_similarity diff dist feature_alpha_dropout hinge_embedding_loss isclose
    isin linalg_matrix_norm linalg_norm logcumsumexp margin_ranking_loss multi_margin_loss multilabel_margin_loss
    nanmean nansum pairwise_distance poisson_nll_loss soft_margin_loss triangular_solve triplet_margin_loss
"""
_SORTED: Final = "argsort cummax cummin kthvalue median mode nanmedian sort topk"

_RULES: Final[dict[str, Callable[[Call], int]]] = {
    **dict.fromkeys(_NO_MEMORY.split(), _nothing),
    **dict.fromkeys(_COPIES.split(), _copy),
    **dict.fromkeys(_TWICE.split(), _times(2)),
    **dict.fromkeys(_SEVERAL_TIMES.split(), _times(6)),
    **dict.fromkeys(_SORTED.split(), _sorted),
    **dict.fromkeys("cat concat stack hstack vstack dstack column_stack".split(), lambda call: 2 * _sum(call)),
    **dict.fromkeys("zeros ones full rand randn new_zeros new_ones new_full randint".split(), _shaped("size")),
    **{"eye": _eye, "arange": _arange, "tril_indices": _indices, "triu_indices": _indices},
    **{"linspace": _counted("steps"), "logspace": _counted("steps"), "randperm": _counted("n")},
    **{"hann_window": lambda call: 4 * max(0, call.number("window_length", 0)) * 8},
    **{"mm": _product("self", "mat2"), "bmm": _product("self", "mat2"), "matmul": _product("self", "other")},
    **{"addmm": _product("mat1", "mat2"), "baddbmm": _product("batch1", "batch2")},
    **{"addbmm": _product("batch1", "batch2"), "mv": _product("self", "vec"), "addmv": _product("mat", "vec")},
    **{"linear": _linear, "bilinear": _bilinear, "outer": _outer, "addr": _outer, "inner": _inner},
    **{"tensordot": _tensordot, "einsum": _einsum, "kron": _kron, "cdist": _cdist},
    **{"repeat": _repeat, "tile": _repeat, "repeat_interleave": _repeat_interleave},
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **{f"{kind}_pad{n}d": _pad for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{"diag": _diagonal_matrix, "diag_embed": _diagonal_matrix, "block_diag": _block_diagonal},
    **dict.fromkeys("conv1d conv2d conv3d convolution".split(), _convolution),
    **{f"conv_transpose{n}d": _convolution for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    **{"max_pool2d_with_indices": _pool(2)},
    **{f"adaptive_{kind}_pool{n}d": _adaptive(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"upsample_{kind}": _upsample(1) for kind in ("nearest1d", "linear1d")},
    **{f"upsample_{kind}": _upsample(2) for kind in ("nearest2d", "bilinear2d", "bicubic2d")},
    **{f"upsample_{kind}": _upsample(3) for kind in ("nearest3d", "trilinear3d")},
    **{"im2col": _columns, "col2im": _columns, "embedding": _embedding, "embedding_bag": _embedding_bag},
    **{"index_select": _index_select, "gather": _gather, "take": _gather, "take_along_dim": _gather},
    **dict.fromkeys("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split(), _scatter),
    **dict.fromkeys("index_add index_add_ index_copy index_copy_ index_fill index_fill_".split(), _scatter),
    **dict.fromkeys("slice_scatter select_scatter masked_scatter masked_scatter_".split(), _scatter),
    **{"index": _index, "index_put": _index_put, "index_put_": _index_put, "one_hot": _one_hot},
    **{"bincount": _bincount, "multinomial": _multinomial, "quantile": _quantile},
    **{"histc": lambda call: max(0, call.number("bins", 100)) * 16 + call.first().nbytes},
    **{"scaled_dot_product_attention": _attention, "ctc_loss": _ctc},
    **dict.fromkeys("lstm gru rnn_tanh rnn_relu".split(), _recurrent),
    **dict.fromkeys("chunk split split_with_sizes tensor_split unbind".split(), _parts),
    **{"nonzero": lambda call: call.first().numel() * max(1, call.first().dim()) * 8},
    **{"normal": lambda call: _shaped("size")(call) if call["size"] is not None else 3 * _common_elements(call) * 8},
}
