"""Memory of this process as the system counts it, and the memory that a stage may use."""

import contextlib
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import torch


def resident_bytes() -> int:
    """Memory of the process now."""
    return _read("resident", lambda: int(psutil.Process().memory_info().rss))


def peak_bytes(device: torch.device) -> int:
    """Maximum memory of the process: on a GPU that of its tensors, otherwise main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":
        # getrusage would include the parent's memory: a child inherits its parent's high-water mark.
        return _read("peak", _high_water_mark)
    return resident_bytes()


def page_faults() -> int:
    """Major page faults of the process so far: memory that had to be read from the disk. 0 where that is not known."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def available_bytes(device: torch.device) -> int:
    """Free memory of the device for a stage."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _read("free", lambda: int(psutil.virtual_memory().available))
    limited = group_bytes()
    return free if limited is None else min(free, limited)


def stage_bytes(device: torch.device, baseline: int) -> int:
    """Memory of the stage now: on a GPU that of its tensors, otherwise the growth of the process since `baseline`."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return max(0, resident_bytes() - baseline)


def spare_bytes(device: torch.device) -> int:
    """Memory of the device that the stage could still use, including memory that torch holds in reserve."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return available_bytes(device) + int(kept)
    return available_bytes(device)


PROCESS_BYTES: Final = 256 << 20
"""Main memory of a process besides its stage: code of torch that is loaded on its first use, and network buffers. None
of it is on a GPU."""


def lent_bytes(available: int, cap: int | None) -> int:
    """Memory for a stage: all that is available, up to the limit of the machine's owner."""
    return available if cap is None else min(available, cap)


def group_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free memory within the limit of a container or service manager; None if there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, most - used)
    return None


def _high_water_mark() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes()


_known: dict[str, int] = {}


def _read(what: str, read: Callable[[], int]) -> int:
    """A figure from the system; the last known one while no file descriptor is left to read it."""
    try:
        _known[what] = read()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or what not in _known:
            raise
    return _known[what]


def forget_peak(device: torch.device) -> None:
    """Reset `peak_bytes`, if the system allows that."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
