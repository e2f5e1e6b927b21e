"""Whether an error of torch means that memory ran out, and how much was asked for."""

import re
from typing import Final

import torch

from ravnest.errors import LentMemoryError
from ravnest.units import byte_size, parse_byte_size

_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "bad_alloc")
_ASKED_FOR: Final = re.compile(r"tried to allocate (\d[\d.]*) ?([KMGT]i?B|bytes)", re.IGNORECASE | re.ASCII)


def is_out_of_memory(error: BaseException) -> bool:
    """On a processor torch raises a RuntimeError like many others: its words tell."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | LentMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _WORDS)


def asked_bytes(error: BaseException) -> int | None:
    """What could not be had, where the error says so."""
    found = _ASKED_FOR.search(str(error))
    if found is None:
        return None
    return parse_byte_size(found[1] + ("" if found[2].lower() == "bytes" else found[2]))


def told(error: BaseException) -> str:
    """Like "memory ran out: another 1.2 GiB were needed"."""
    asked = asked_bytes(error)
    return "memory ran out" + ("" if asked is None else f": another {byte_size(asked)} were needed")
