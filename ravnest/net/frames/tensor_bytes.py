"""Tensors as raw bytes, without a copy in either direction.

`tensor_bytes` lends the memory of a tensor to a single `bytes.join`; `tensor_view` makes a tensor over bytes that came
from a peer. Only the element types of `WIRE_DTYPES` may travel; PeerError for any other.
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
"""Element types that travel, and their number on the wire."""

TORCH_DTYPES: Final[dict[int, tuple[torch.dtype, int]]] = {
    code: (dtype, dtype.itemsize) for dtype, code in WIRE_DTYPES.items()
}
"""For each number on the wire, the element type and its size in bytes."""


def on_host(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor as `dense` returns it, in the memory of the CPU (itself if it is that already)."""
    tensor, order = dense(name, tensor)
    return tensor if tensor.is_cpu else tensor.cpu(), order


def dense(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor in dense, contiguous memory (itself if it is that already), and its dimensions in the order of that
    memory; empty if that is the order of its shape.

    A transposed or channels-last tensor keeps its order on the other side: operators choose their kernels by it, and a
    model that is cut there must compute bit for bit the same as the whole model. Raises PeerError for a tensor that
    cannot travel: an element type off the table, or a tensor that is not dense.
    """
    if tensor.dtype not in WIRE_DTYPES:
        raise PeerError(
            f"the tensor {name!r} has the element type {tensor.dtype}, which frames do not carry; "
            f"convert it to one of {', '.join(str(dtype).removeprefix('torch.') for dtype in WIRE_DTYPES)}"
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
    # The order of an expanded tensor (stride 0) means nothing.
    if 0 in strides or order == tuple(range(len(order))):
        return tensor.contiguous(), ()
    return tensor.permute(order).contiguous(), order


def tensor_bytes(tensor: torch.Tensor) -> bytes | memoryview:
    """The memory of a tensor that `on_host` returned. The caller keeps the tensor alive while it uses the bytes."""
    if tensor.numel() == 0:
        return b""
    return memoryview(_ANY_BYTES.from_address(tensor.data_ptr()))[: tensor.nbytes]


# One array type that is longer than any tensor, and sliced: ctypes creates a type for each length and caches it, so
# types for all lengths would fill the memory over hours.
_ANY_BYTES = ctypes.c_char * (1 << 48)


def tensor_view(
    name: str, data: bytes, offset: int, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] = ()
) -> torch.Tensor:
    """A tensor over the bytes of `data` from `offset` on, without a copy. The caller has checked that the bytes are
    there.

    `order` is the one that `on_host` returned, a permutation of the dimensions. The tensor keeps `data` alive. Raises
    PeerError for bool values other than 0 and 1, because operators may do anything with those.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    if dtype is torch.bool and flat.view(torch.uint8).max().item() > 1:
        raise PeerError(f"the tensor {name!r} of a frame says it is bool but holds bytes other than 0 and 1")
    return shaped(flat, shape, order)


def shaped(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Flat values as a view with the shape and order that the tensor had before `dense`."""
    if not order:
        return flat.view(shape)
    return flat.view([shape[dimension] for dimension in order]).permute([order.index(d) for d in range(len(order))])


def _silence_read_only_warning() -> None:
    # torch warns once per process that a tensor over `bytes` could be written to. This call uses that one warning up.
    # Writing would do no harm, because only the frame has these bytes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(8), dtype=torch.uint8)


if sys.byteorder != "little":
    raise ImportError("Ravnest sends tensors as little-endian bytes and needs a little-endian machine")
_silence_read_only_warning()
