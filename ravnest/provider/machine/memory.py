"""How much memory this process uses, as the system counts it, and how much a stage may."""

import contextlib
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import torch


def resident_bytes() -> int:
    """What the process holds now."""
    return _read("resident", lambda: int(psutil.Process().memory_info().rss))


def peak_bytes(device: torch.device) -> int:
    """The most the process has held: on a GPU the most its tensors took there, else of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":
        # getrusage would count the parent's memory too: a child starts with its parent's high-water mark.
        return _read("peak", _high_water_mark)
    return resident_bytes()


def available_bytes(device: torch.device) -> int:
    """What is free on the device for a stage."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _read("free", lambda: int(psutil.virtual_memory().available))
    limited = group_bytes()
    return free if limited is None else min(free, limited)


def stage_bytes(device: torch.device, baseline: int) -> int:
    """What the stage takes now: on a GPU its tensors, else what the process holds beyond what it did before."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return max(0, resident_bytes() - baseline)


def spare_bytes(device: torch.device) -> int:
    """What the stage could still have of the device: also what torch keeps there for it and does not use now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return available_bytes(device) + int(kept)
    return available_bytes(device)


PROCESS_BYTES: Final = 256 << 20
"""What a process may take beyond its stage in main memory: code of torch that is loaded when it is used first, buffers
of the network. None of it is on a GPU."""


def lent_bytes(available: int, cap: int | None) -> int:
    """What a stage may use: what is available, and no more than the owner of the machine said."""
    return available if cap is None else min(available, cap)


def group_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of the limit that a container or a service manager has set; None where there is no limit."""
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
    """A figure of the system's; the one before while no file descriptor is left to read it with."""
    try:
        _known[what] = read()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or what not in _known:
            raise
    return _known[what]


def forget_peak(device: torch.device) -> None:
    """Begins the count of `peak_bytes` anew, where the system lets that be done."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
