"""Guards of window operators: convolutions, pools, columns and resizing. Kernels divide by strides and trust scales."""

import math
from collections.abc import Callable
from typing import Final

from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.size_parts import spatial_sizes

_MAX_STRIDE: Final = 64
"""Maximum stride. A stride may be larger than the input, as in 1x1 convolutions of small images, up to this limit."""


def _convolution(call: Call) -> str:
    own, weight, bias = call["input"], call["weight"], call["bias"]
    count = weight.dim() - 2
    if not 1 <= count <= 3 or own.dim() not in (count + 1, count + 2):
        return f"gives an input of {own.dim()} dimensions and a weight of {weight.dim()}"
    if call.short_name != "convolution" and not call.short_name.endswith(f"{count}d"):
        return f"gives a weight of {weight.dim()} dimensions"
    if weight.numel() == 0:
        return "gives a weight without elements"
    moved = call.short_name.startswith("conv_transpose") or bool(call["transposed"])
    groups = call.number("groups", 1)
    channels, made = own.shape[-count - 1], weight.shape[1] * groups if moved else weight.shape[0]
    if groups < 1 or weight.shape[0] % groups or (not moved and weight.shape[1] * groups != channels):
        return f"gives {channels} channels to a weight of shape {tuple(weight.shape)} in {groups} groups"
    if moved and weight.shape[0] != channels:
        return f"gives {channels} channels to a weight of shape {tuple(weight.shape)}"
    if bias is not None and tuple(bias.shape) != (made,):
        return f"gives a bias of shape {tuple(bias.shape)} for {made} channels"
    return _steps_misfit(call, count, [*own.shape[-count:]], [*weight.shape[2:]], moved)


def _steps_misfit(call: Call, count: int, sizes: list[int], kernel: list[int], moved: bool) -> str:
    stride, dilation = call.numbers("stride", count, 1), call.numbers("dilation", count, 1)
    spans = isinstance(call["padding"], str)
    padding = [0] * count if spans else call.numbers("padding", count, 0)
    extra = call.numbers("output_padding", count, 0)
    if any(len(given) != count for given in (stride, dilation, padding, extra)):
        return "gives strides, paddings or dilations for a different number of dimensions"
    if min(*stride, *dilation) < 1 or min(*padding, *extra) < 0:
        return "gives a stride or dilation below 1, or a padding below 0"
    if not moved and any(s > max(_MAX_STRIDE, n + 2 * p) for s, n, p in zip(stride, sizes, padding, strict=True)):
        return "steps beyond its input"
    if moved and any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        return "gives an output padding that is not smaller than stride or dilation"
    if not moved and not spans and min(spatial_sizes(sizes, kernel, stride, padding, dilation)) < 1:
        return "has no room for its window"
    return ""


def _pool(count: int) -> Callable[[Call], str]:
    def guard(call: Call) -> str:
        kernel = call.numbers("kernel_size", count, 1)
        stride = call.numbers("stride", count, 1) if call["stride"] else kernel
        padding, dilation = call.numbers("padding", count, 0), call.numbers("dilation", count, 1)
        own = call.first()
        if own.dim() not in (count + 1, count + 2):
            return f"gives an input of {own.dim()} dimensions"
        if any(len(given) != count for given in (kernel, stride, padding, dilation)):
            return "gives a window of a different number of dimensions"
        if min(*kernel, *stride, *dilation) < 1 or min(padding) < 0:
            return "gives a window, stride or dilation below 1, or a padding below 0"
        if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
            return "pads by more than half of its window"
        if any(
            n + 2 * p <= d * (k - 1) for n, p, d, k in zip(own.shape[-count:], padding, dilation, kernel, strict=True)
        ):
            return "has no room for its window"
        if any(s > max(_MAX_STRIDE, n + 2 * p) for s, n, p in zip(stride, own.shape[-count:], padding, strict=True)):
            return "steps beyond its input"
        return "divides by 0" if call["divisor_override"] == 0 else ""

    return guard


def _adaptive(count: int) -> Callable[[Call], str]:
    def guard(call: Call) -> str:
        own = call.first()
        if own.dim() not in (count + 1, count + 2) or 0 in own.shape[-count:]:
            return f"gives an input of shape {tuple(own.shape)}"
        sizes = call.numbers("output_size", count, 1)
        return "" if len(sizes) == count and min(sizes) >= 0 else f"asks for sizes {sizes}"

    return guard


def _columns(call: Call) -> str:
    kernel, stride = call.numbers("kernel_size", 2, 1), call.numbers("stride", 2, 1)
    padding, dilation = call.numbers("padding", 2, 0), call.numbers("dilation", 2, 1)
    own = call.first()
    if any(len(given) != 2 for given in (kernel, stride, padding, dilation)):
        return "gives a window of a different number of dimensions"
    if min(*kernel, *stride, *dilation) < 1 or min(padding) < 0:
        return "gives a window, stride or dilation below 1, or a padding below 0"
    if call.short_name == "im2col":
        if own.dim() not in (3, 4) or 0 in own.shape[-3:]:
            return f"gives an input of shape {tuple(own.shape)}"
        sizes = [*own.shape[-2:]]
    else:
        sizes = call.numbers("output_size", 2, 1)
        if own.dim() not in (2, 3) or 0 in own.shape[-2:] or len(sizes) != 2 or min(sizes) < 1:
            return f"gives an input of shape {tuple(own.shape)} for sizes {sizes}"
        if own.shape[-2] % math.prod(kernel):
            return "gives columns that are not an integer number of windows"
    room = [n + 2 * p - d * (k - 1) - 1 for n, p, d, k in zip(sizes, padding, dilation, kernel, strict=True)]
    if min(room) < 0:
        return "has no room for its window"
    places = math.prod(r // s + 1 for r, s in zip(room, stride, strict=True))
    return "" if call.short_name == "im2col" or own.shape[-1] == places else f"gives other than {places} windows"


def _resize(count: int) -> Callable[[Call], str]:
    def guard(call: Call) -> str:
        own = call.first()
        if own.dim() != count + 2 or 0 in own.shape[1:]:
            return f"gives an input of shape {tuple(own.shape)}"
        if call.op.endswith(".vec"):
            scales = call["scale_factors"]
            if (scales is None) == (call["output_size"] is None):
                return "gives both a size and scales, or neither"
            sizes = None if call["output_size"] is None else call.numbers("output_size", count, 1)
        else:
            named = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
            given = [call[name] for name in named]
            scales = None if all(scale is None for scale in given) else given
            sizes = call.numbers("output_size", count, 1)
        if sizes is not None and (len(sizes) != count or min(sizes) < 1):
            return f"asks for sizes {sizes}"
        return "" if scales is None else _scales_misfit([*own.shape[2:]], sizes, list(scales))

    return guard


def _scales_misfit(own: list[int], sizes: list[int] | None, scales: list[float | None]) -> str:
    """Kernels compute the positions that they read from the scales, not from the sizes."""
    if len(scales) != len(own):
        return "gives scales for a different number of dimensions"
    for place, scale in enumerate(scales):
        if scale is None:
            continue
        if not 1e-6 <= scale <= 1e6:
            return f"gives a scale of {scale}"
        made = math.floor(own[place] * scale)
        if made < 1 or (sizes is not None and sizes[place] != made):
            return f"gives a scale of {scale} that does not fit its sizes"
    return ""


def _positive(name: str) -> Callable[[Call], str]:
    def guard(call: Call) -> str:
        value = call[name]
        return "" if value is None or value >= 1 else f"gives {value} as {name!r}"

    return guard


SHAPES: Final[dict[str, Callable[[Call], str]]] = {
    **dict.fromkeys("conv1d conv2d conv3d convolution".split(), _convolution),
    **{f"conv_transpose{n}d": _convolution for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    "max_pool2d_with_indices": _pool(2),
    **{f"adaptive_{kind}_pool{n}d": _adaptive(n) for kind in ("avg", "max") for n in (1, 2, 3)},
    **{"im2col": _columns, "col2im": _columns},
    **{f"upsample_{kind}": _resize(1) for kind in ("nearest1d", "linear1d")},
    **{f"upsample_{kind}": _resize(2) for kind in ("nearest2d", "bilinear2d", "bicubic2d")},
    **{f"upsample_{kind}": _resize(3) for kind in ("nearest3d", "trilinear3d")},
    "pixel_shuffle": _positive("upscale_factor"),
    "pixel_unshuffle": _positive("downscale_factor"),
    "channel_shuffle": _positive("groups"),
    "chunk": _positive("chunks"),
    "tensor_split.sections": _positive("sections"),
    "unfold": _positive("step"),
}
