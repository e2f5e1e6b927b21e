"""Speed of this machine's device, measured once and stored on the disk, so that the next join need not measure again.

A measurement while other programs kept the processor busy is used, but not stored. A stored one that is damaged, too
old or of another setup is replaced by a new measurement. If nothing can be stored, every join measures.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import platform
import secrets
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import psutil
import torch

from ravnest.engine.speed.device_speed import MEASUREMENT_VERSION, Speed, measure_speed
from ravnest.provider.machine.memory import forget_peak
from ravnest.provider.machine.torch_footprint import give_free_memory_back

KEPT_SECONDS: Final = 30 * 86400.0
"""Maximum age of a measurement, so that a machine that was slowed down once does not count as slow forever."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The conditions of a measurement, which counts only for the same setup."""

    device: str
    name: str
    threads: int
    torch_version: str
    measurement: int

    @classmethod
    def here(cls, device: torch.device) -> "Setup":
        """The setup of this process on the device."""
        return cls(str(device), device_name(device), torch.get_num_threads(), torch.__version__, MEASUREMENT_VERSION)


@dataclass(frozen=True, slots=True)
class Load:
    """Processor time in seconds since some moment: of the machine, and the part that this process used."""

    seconds: float
    cores: int
    all_seconds: float
    own_seconds: float

    @classmethod
    def now(cls) -> "Load":
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(time.monotonic(), psutil.cpu_count() or 1, sum(times[:8]) - idle, own.user + own.system)

    def busy_with_others_since(self, before: "Load") -> bool:
        """Whether other programs used much of the processor since then. False after too short a time to tell."""
        elapsed = self.seconds - before.seconds
        others = (self.all_seconds - before.all_seconds) - (self.own_seconds - before.own_seconds)
        return elapsed >= _MIN_LOAD_SECONDS and others > _BUSY_PART * elapsed * self.cores


async def machine_speed(device: torch.device, memory_bytes: int, *, fresh: bool = False) -> Speed:
    """The speed of the device, from the disk or measured now, which takes a few seconds. `fresh` always measures."""
    setup = Setup.here(device)
    kept = None if fresh else read_kept(setup)
    if kept is not None:
        return kept
    before = Load.now()
    speed = await _in_a_thread_of_its_own(device, memory_bytes)
    busy = Load.now().busy_with_others_since(before)
    give_free_memory_back()
    forget_peak(device)
    if not busy:
        keep(setup, speed)
    return speed


def device_name(device: torch.device) -> str:
    """The manufacturer's name of the device, or the kind of processor if that is all that is known."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return " ".join(line.partition(":")[2].split())[:100]
    return (platform.processor() or platform.machine())[:100]


def read_kept(setup: Setup, now: float | None = None) -> Speed | None:
    """The stored speed for this setup; None if there is none that can be used."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RuntimeError):
        record = json.loads(_file(setup).read_bytes())
        age_seconds = (time.time() if now is None else now) - float(record["measured_at"])
        speed = Speed(**{each.name: float(record[each.name]) for each in fields(Speed)})
        sound = all(math.isfinite(figure) and figure > 0 for figure in asdict(speed).values())
        if sound and record["setup"] == asdict(setup) and 0 <= age_seconds < KEPT_SECONDS:
            return speed
    return None


def keep(setup: Setup, speed: Speed, now: float | None = None) -> None:
    """Store the speed, completely or not at all; does nothing if the folder cannot be written."""
    record = {"setup": asdict(setup), **asdict(speed), "measured_at": time.time() if now is None else now}
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(setup)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # Private, like all files of a provider.
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(record, indent=2) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


_MIN_LOAD_SECONDS: Final = 0.2
_BUSY_PART: Final = 0.2


async def _in_a_thread_of_its_own(device: torch.device, memory_bytes: int) -> Speed:
    """Measure in a thread that ends afterwards, because OpenMP keeps a team of threads for each thread that has
    computed."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Speed] = loop.create_future()

    def measure() -> None:
        try:
            speed = measure_speed(device, memory_bytes)
        except Exception as error:
            _tell(loop, done, None, error)
        else:
            _tell(loop, done, speed, None)

    threading.Thread(target=measure, name="ravnest-measuring", daemon=True).start()
    return await done


def _tell(
    loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Speed]", speed: Speed | None, error: Exception | None
) -> None:
    def settle() -> None:
        if done.cancelled():
            return
        if speed is not None:
            done.set_result(speed)
        elif error is not None:
            done.set_exception(error)

    # The loop is closed if the process was interrupted meanwhile.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)


def _file(setup: Setup) -> Path:
    """The file for this setup. RuntimeError if the user has no home folder."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else Path.home() / ".cache"
    key = hashlib.sha256(json.dumps(asdict(setup), sort_keys=True).encode()).hexdigest()[:16]
    return folder / "ravnest" / "speed" / f"{key}.json"
