"""How much memory this process uses, as the system counts it."""

import sys

import psutil
import torch


def resident_bytes() -> int:
    """What the process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    """The most the process has held: on a GPU the most its tensors took there, else of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":
        # getrusage would count the parent's memory too: a child starts with its parent's high-water mark.
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return resident_bytes()


def available_bytes(device: torch.device) -> int:
    """What is free on the device for a stage."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
