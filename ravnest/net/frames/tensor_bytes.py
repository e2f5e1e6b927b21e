"""Tensors as raw bytes, both ways without a copy.

`tensor_bytes` lends the memory of a tensor to a single `bytes.join`; `tensor_view` lays a tensor over bytes that
came from a peer. What may travel is the table `WIRE_DTYPES`; anything else is refused with a sentence.
"""

import ctypes
import math
import sys
import warnings
from typing import Final

import torch

from ravnest.errors import PeerError
from ravnest.net.v1 import frame_pb2

WIRE_DTYPES: Final[dict[torch.dtype, int]] = {
    torch.bool: frame_pb2.DTYPE_BOOL,
    torch.uint8: frame_pb2.DTYPE_UINT8,
    torch.int8: frame_pb2.DTYPE_INT8,
    torch.int16: frame_pb2.DTYPE_INT16,
    torch.int32: frame_pb2.DTYPE_INT32,
    torch.int64: frame_pb2.DTYPE_INT64,
    torch.float16: frame_pb2.DTYPE_FLOAT16,
    torch.bfloat16: frame_pb2.DTYPE_BFLOAT16,
    torch.float32: frame_pb2.DTYPE_FLOAT32,
    torch.float64: frame_pb2.DTYPE_FLOAT64,
}
"""The element types that travel, and their number on the wire."""

TORCH_DTYPES: Final[dict[int, tuple[torch.dtype, int]]] = {
    code: (dtype, dtype.itemsize) for dtype, code in WIRE_DTYPES.items()
}
"""The way back: the number on the wire, to the element type and its size in bytes."""


def on_host(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor as `dense` has it, in the memory of the CPU (itself where it already is that)."""
    tensor, order = dense(name, tensor)
    return tensor if tensor.is_cpu else tensor.cpu(), order


def dense(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor as dense, contiguous memory (itself where it already is that), and its dimensions in the order of that
    memory; none where that is the order of its shape.

    A transposed or channels-last tensor stays that on the other side: operators choose their kernels by it, and a
    model cut there must compute bit for bit what the whole model does. Raises PeerError for a tensor that cannot
    travel: an element type off the table, or one that is not dense.
    """
    if tensor.dtype not in WIRE_DTYPES:
        raise PeerError(
            f"the tensor {name!r} has the element type {tensor.dtype}, which frames do not carry; "
            f"convert it to one of {_dtype_names()}"
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise PeerError(f"the tensor {name!r} has no dense memory to send; make it dense first")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor, ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    # An expanded tensor (stride 0) has no order worth keeping.
    if 0 in strides or order == tuple(range(len(order))):
        return tensor.contiguous(), ()
    return tensor.permute(order).contiguous(), order


def tensor_bytes(tensor: torch.Tensor) -> bytes | memoryview:
    """The memory of a tensor that `on_host` returned. The caller keeps the tensor alive while it uses the bytes."""
    if tensor.numel() == 0:
        return b""
    return memoryview(_ANY_BYTES.from_address(tensor.data_ptr()))[: tensor.nbytes]


# Of one length, of which as much is taken as there is: an array of another length is another type in ctypes, and those
# of all lengths that messages have would fill memory for hours before anybody cleans up after them.
_ANY_BYTES = ctypes.c_char * (1 << 48)


def tensor_view(
    name: str, data: bytes, offset: int, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] = ()
) -> torch.Tensor:
    """A tensor over the bytes of `data` from `offset` on, which the caller has checked to be there. No copy.

    `order` is that of `on_host`, a permutation of the dimensions. The tensor keeps `data` alive. Raises PeerError for
    bool values that are neither 0 nor 1, since operators may do anything at all with those.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    if dtype is torch.bool and flat.view(torch.uint8).max().item() > 1:
        raise PeerError(f"the tensor {name!r} of a frame says it is bool but holds bytes other than 0 and 1")
    return shaped(flat, shape, order)


def shaped(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Flat values as the tensor that `dense` made flat: a view of them."""
    if not order:
        return flat.view(shape)
    return flat.view([shape[dimension] for dimension in order]).permute([order.index(d) for d in range(len(order))])


def _dtype_names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in WIRE_DTYPES)


def _silence_read_only_warning() -> None:
    # torch warns, once in the life of a process, that a tensor over `bytes` could be written to. That one warning
    # is spent here; nobody else holds the bytes of a frame, so writing to the tensor would harm nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(8), dtype=torch.uint8)


if sys.byteorder != "little":
    raise ImportError("Ravnest sends tensors as little-endian bytes and needs a little-endian machine")
_silence_read_only_warning()
