"""Keeps a provider's process small: without the part of torch that no provider needs, and without hoarded memory.

Both are matters of the whole process, so they are settled once, before torch is used.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_LARGE_BYTES: Final = 4 << 20
_KEPT_BYTES: Final = 256 << 20
# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def leave_out_the_compiler() -> None:
    """Puts a stand-in where torch.optim looks for torch._dynamo, unless that is loaded already.

    torch.optim imports it, the front end of torch.compile, with the first optimizer that is made, only to tell it not
    to compile. A provider interprets graphs and never compiles: without it, it takes 75 MB less and starts more than a
    second sooner.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _NoCompiler(_COMPILER)


def give_memory_back() -> None:
    """Makes the memory of large freed tensors go back to the system, where the C library can be told so.

    Left to itself it keeps tensors of up to 32 MB, in pieces that the next ones do not fit into, and so takes half as
    much again as a stage uses. Memory that comes fresh from the system costs a page fault every 4 KiB, so what is
    smaller is kept at the top of the heap and used again, and huge pages make the rest cheap where they can be had.
    """
    # torch asks for huge pages for what it allocates from 2 MB on.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def give_free_memory_back() -> None:
    """Gives back now what was kept to be used again: for when much of another kind of work has just ended."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class _NoCompiler(ModuleType):
    """Answers what torch.optim asks of its compiler. Anything else is asked of the real one, which is loaded then."""

    @staticmethod
    def graph_break() -> None:
        """Where a compiler would end a graph."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """The function as it is: nothing would compile it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)
