"""Memory footprint of torch in a provider: without the compiler, which no provider needs, and without hoarded memory.

Both are properties of the whole process, so they are set once, before torch is used.
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
    """Put a stand-in in the place of torch._dynamo for torch.optim, unless it is loaded already.

    With the first optimizer, torch.optim imports the front end of torch.compile, only to tell it not to compile. A
    provider interprets graphs and never compiles. Without the compiler it uses 75 MB less memory and starts more than a
    second sooner.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _NoCompiler(_COMPILER)


def give_memory_back() -> None:
    """Make the C library return the memory of large freed tensors to the system, if it can be told so.

    By default it holds on to tensors of up to 32 MB, in pieces that the next tensors do not fit into, which costs half
    as much memory again as a stage uses. Fresh memory costs a page fault every 4 KiB, so smaller pieces stay at the top
    of the heap for reuse, and huge pages make the other faults cheap.
    """
    # torch requests huge pages for allocations from 2 MB on.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def give_free_memory_back() -> None:
    """Return the free memory of the heap now, for example after a different kind of work has ended."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class _NoCompiler(ModuleType):
    """Answers the questions of torch.optim to the compiler. Any other use loads the real compiler."""

    @staticmethod
    def graph_break() -> None:
        """Nothing is compiled, so there is no graph to break."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """The function itself, because nothing would compile it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)
