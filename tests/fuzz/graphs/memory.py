"""Guard pages around the memory of tensors, and fresh memory filled with a byte of choice (guarded_memory.c)."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).parent / "guarded_memory.c"
HARD_LIMIT_BYTES: Final = 1 << 30
"""Maximum size of an allocation. A larger request means that the limit on lent memory did not work."""


def missing() -> str:
    """Why guard pages are not available; empty if they are."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "guard pages need Linux on x86-64"
    return "" if shutil.which("gcc") else "guard pages need gcc"


def build(folder: Path) -> Path:
    """Build the library into the folder; returns its path for LD_PRELOAD."""
    library = folder / "guarded_memory.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)], check=True)
    return library


class GuardedMemory:
    """The memory guard of this process, which was started with the library."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("guard_live", "guard_peak", "guard_refused", "guard_damaged"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.guard_limit.argtypes = (ctypes.c_size_t,)
        if self._library.guard_enable(1) != 0:
            raise MemoryError("no address space for guard pages")
        self._library.guard_limit(HARD_LIMIT_BYTES)
        self._before = 0

    def fill(self, byte: int) -> None:
        """Set the byte that fills fresh memory."""
        self._library.guard_fill(byte)

    def forget_peak(self) -> None:
        self._library.guard_forget_peak()
        self._before = int(self._library.guard_live())

    @property
    def peak_bytes(self) -> int:
        return int(self._library.guard_peak()) - self._before

    def wrong(self, max_bytes: int) -> str:
        """The violation since `forget_peak`, in words; empty if there was none."""
        if self._library.guard_damaged():
            return "wrote beyond the end of a tensor"
        refused = int(self._library.guard_refused())
        if refused:
            return f"asked for {refused} bytes at once"
        return f"took {self.peak_bytes} bytes" if self.peak_bytes > max_bytes else ""
