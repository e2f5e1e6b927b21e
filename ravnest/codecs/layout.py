"""Layout of encoded bytes, shared by the codecs: size checks, views as numbers, and division into blocks."""

import sys
import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ravnest.errors import PeerError

LARGEST: Final = torch.finfo(torch.float32).max
SMALLEST_NORMAL: Final = torch.finfo(torch.float32).tiny
"""Some machines compute smaller numbers as zero, so that not all would get the same bits."""

_SCRATCH_VALUES: Final = 1 << 18
"""1 MiB of float32, which stays in a core's cache between passes."""

if sys.byteorder != "little":
    raise ImportError("Ravnest sends numbers as little-endian bytes and needs a little-endian machine")


def check_size(codec: str, data: Tensor, count: int, size_bytes: int) -> None:
    """PeerError unless `data` has exactly the size of `count` encoded values."""
    if data.numel() != size_bytes:
        raise PeerError(f"{count} values in {codec} are {size_bytes} bytes, but {data.numel()} came")


def bytes_of(values: Tensor) -> Tensor:
    """A flat contiguous tensor as uint8, in the same memory."""
    return values.view(torch.uint8)


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Flat bytes as numbers of `dtype`: in the same memory if it is aligned, otherwise a copy."""
    data = data.contiguous()
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def blocks_and_scratch(values: Tensor, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Flat values as rows of `block`, the last one padded with zeros, in parts that fit into the cache.

    Yields for each part the indices of its rows, its values, and scratch memory of its shape. The scratch memory
    belongs to the thread and is reused for every part, because new pages from the operating system cost more than all
    passes over them. A part must therefore be finished before the next one.
    """
    whole = values.numel() // block
    step = _SCRATCH_VALUES // block
    scratch = _scratch()
    rows = values[: whole * block].view(-1, block)
    for start in range(0, whole, step):
        part = rows[start : start + step]
        yield slice(start, start + len(part)), part, scratch[: part.numel()].view(-1, block)
    rest = values[whole * block :]
    if rest.numel():
        part = torch.nn.functional.pad(rest, (0, block - rest.numel())).view(1, block)
        yield slice(whole, whole + 1), part, scratch[:block].view(1, block)


def check_scales(codec: str, scales: Tensor, largest: float) -> None:
    """PeerError unless all of `scales` (at least one) are between the smallest normal number and `largest`."""
    low, high = torch.aminmax(scales)
    # Both comparisons are false for NaN.
    if not (float(low) >= SMALLEST_NORMAL and float(high) <= largest):
        raise PeerError(f"a scale in {codec} is not one that an encoder writes: the bytes are damaged or forged")


_own = threading.local()


def _scratch() -> Tensor:
    scratch: Tensor | None = getattr(_own, "scratch", None)
    if scratch is None:
        # A tensor created in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            scratch = _own.scratch = torch.empty(_SCRATCH_VALUES)
    return scratch
