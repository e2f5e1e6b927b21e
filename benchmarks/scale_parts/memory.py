"""Peak memory of the calling process, for the contenders that are plain PyTorch; Ravnest reports its own."""

import ctypes
import gc
from contextlib import suppress


def peak_bytes() -> int:
    """The largest resident memory of this process since its start, or since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Release freed memory to the system, and count the peak from now on."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
