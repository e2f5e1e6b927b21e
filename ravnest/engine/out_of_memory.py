"""Recognition of errors that mean that memory ran out, and of the amount that was requested."""

import re
from typing import Final

import torch

from ravnest.errors import LentMemoryError
from ravnest.units import byte_size, parse_byte_size

_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "bad_alloc")
_REQUESTED: Final = re.compile(r"tried to allocate (\d[\d.]*) ?([KMGT]i?B|bytes)", re.IGNORECASE | re.ASCII)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out. For a CPU torch raises a RuntimeError, recognized by its text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | LentMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _WORDS)


def requested_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed; None if the error does not state it."""
    found = _REQUESTED.search(str(error))
    if found is None:
        return None
    return parse_byte_size(found[1] + ("" if found[2].lower() == "bytes" else found[2]))


def out_of_memory_text(error: BaseException) -> str:
    """A message such as "memory ran out: another 1.2 GiB were needed"."""
    requested = requested_bytes(error)
    return "memory ran out" + ("" if requested is None else f": another {byte_size(requested)} were needed")
