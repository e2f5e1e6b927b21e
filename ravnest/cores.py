"""CPU cores that this process may use, and their division among several providers.

A container or a service manager may allow fewer cores than the machine has, by affinity or by a CPU quota. More threads
than usable cores compete for them and are slower than fewer threads.
"""

import contextlib
import os
import sys
from pathlib import Path, PurePosixPath
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUP: Final = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores that this process may use; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = quota_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def fair_share(cores: int, providers: int, place: int = 0) -> int:
    """Number of cores for the provider at index `place` of those that share a machine; at least 1.

    The first providers get the remainder of the division, so that no core stays idle.
    """
    return max(1, cores // providers + (place < cores % providers))


def quota_cores(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> float | None:
    """CPU quota of the control groups of this process, in cores; None without a quota."""
    quotas = []
    with contextlib.suppress(OSError, ValueError):
        for line in own_group.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups if not controllers else groups / "cpu"
            # A parent group may have a lower quota. In a container the path may be the host's and not exist here.
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (root / inside, *(root / parent for parent in inside.parents), root):
                if (quota := _quota(folder)) is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else None
    return None
