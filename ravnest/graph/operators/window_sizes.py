"""Memory of window operators: convolutions, pools, resizing and columns."""

import math
from collections.abc import Callable

import torch

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import spatial_sizes


def convolution(call: Call) -> int:
    own, weight = call["input"], call["weight"]
    count = weight.dim() - 2
    if count < 1 or own.dim() not in (count + 1, count + 2):
        raise ValueError("the input and the weight of a convolution have different numbers of dimensions")
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
        # Some kernels copy every window into one large matrix.
        total += (1 if own.device.type != "cpu" else batch) * own.shape[-count - 1] * math.prod(kernel) * columns
    else:
        total += own.shape[-count - 1] * math.prod(kernel) * columns if count == 3 else 0
    return int(total * size)


def pool(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        kernel = call.numbers("kernel_size", count, 1)
        stride = kernel if not call["stride"] else call.numbers("stride", count, 1)
        padding, dilation = call.numbers("padding", count, 0), call.numbers("dilation", count, 1)
        if any(s < 1 for s in stride):
            raise ValueError("a stride must be at least 1")
        out = spatial_sizes(own.shape[-count:], kernel, stride, padding, dilation)
        return int(int(math.prod(own.shape[:-count]) * math.prod(out) * (own.element_size() + 8) * 2) + own.nbytes)

    return rule


def adaptive(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        return int(
            math.prod(own.shape[:-count])
            * math.prod(max(0, s) for s in call.numbers("output_size", count, 1))
            * (own.element_size() + 8)
        )

    return rule


def upsample(count: int) -> Callable[[Call], int]:
    def rule(call: Call) -> int:
        own = call.first()
        scales = call["scale_factors"]
        if call["output_size"] is not None:
            out = math.prod(max(0, s) for s in call.numbers("output_size", count, 1))
        else:
            out = math.prod(int(max(0.0, n * s)) for n, s in zip(own.shape[-count:], scales or [], strict=True))
        return int(int(2 * math.prod(own.shape[:-count]) * out * max(4, own.element_size())) + own.nbytes)

    return rule


def columns(call: Call) -> int:
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
