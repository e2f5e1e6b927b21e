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
_KEPT_BYTES: Final = 2 << 20
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
    """Makes the memory of freed tensors go back to the system, where the C library can be told so.

    Left to itself it keeps tensors of up to 32 MB, in pieces that the next ones do not fit into, and so takes half as
    much again as a stage uses. Huge pages make memory that comes fresh from the system cheap.
    """
    # torch asks for huge pages for what it allocates from 2 MB on.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


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
