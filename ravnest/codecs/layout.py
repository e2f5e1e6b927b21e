"""What the codecs share about bytes: their size is checked before anything else, and numbers are laid over them."""

import sys
import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ravnest.errors import PeerError

LARGEST: Final = torch.finfo(torch.float32).max
SMALLEST_NORMAL: Final = torch.finfo(torch.float32).tiny
"""Anything smaller some machines compute as zero, and then not all get the same bits."""

_SCRATCH_VALUES: Final = 1 << 18
"""1 MiB of float32: stays in a core's cache between the passes over it."""

if sys.byteorder != "little":
    raise ImportError("Ravnest sends numbers as little-endian bytes and needs a little-endian machine")


def check_size(codec: str, data: Tensor, count: int, size_bytes: int) -> None:
    """PeerError unless `data` is exactly as long as `count` values encoded."""
    if data.numel() != size_bytes:
        raise PeerError(f"{count} values in {codec} are {size_bytes} bytes, but {data.numel()} came")


def bytes_of(values: Tensor) -> Tensor:
    """The memory of a flat contiguous tensor as uint8."""
    return values.view(torch.uint8)


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Flat bytes as numbers of `dtype`: the same memory where it is aligned for them, else a copy."""
    data = data.contiguous()
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def blocks_and_scratch(values: Tensor, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Flat values as rows of `block`, the last one filled up with zeros, a part that fits into the cache at a time.

    Each part comes with the rows it covers and with memory of its shape to compute in. That memory is the thread's own
    and always the same, because fresh pages from the system cost more than all passes over them; it is valid until the
    next part, and no two parts may be worked on at once.
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
    """PeerError unless all of `scales` (at least one) are numbers from the smallest normal one to `largest`."""
    low, high = torch.aminmax(scales)
    # Of a NaN both comparisons are false.
    if not (float(low) >= SMALLEST_NORMAL and float(high) <= largest):
        raise PeerError(f"a scale in {codec} is not one that an encoder writes: the bytes are damaged or forged")


_own = threading.local()


def _scratch() -> Tensor:
    scratch: Tensor | None = getattr(_own, "scratch", None)
    if scratch is None:
        # What is made in inference mode could be written to in no other.
        with torch.inference_mode(False):
            scratch = _own.scratch = torch.empty(_SCRATCH_VALUES)
    return scratch
