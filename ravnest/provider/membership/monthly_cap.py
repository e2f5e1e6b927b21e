"""Monthly cap on a provider's traffic: counted on the disk by calendar month, for all providers of this user together.

When the month's data runs out, state is reduced first, because training goes on without it. When the cap is reached,
the provider hands its stage over and leaves. The data that this takes is kept in reserve. A count that cannot be read
or written is an error for the user: a cap that is silently ignored would cost money. A damaged count is set aside, the
user is told, and counting begins again: the machine may have lost power while the file was on its way to the disk.
"""

import asyncio
import fcntl
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ravnest.background import in_thread
from ravnest.errors import RunError
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.traffic_limit import Traffic
from ravnest.units import byte_size

LOOK_SECONDS: Final = 20.0
"""Time between two additions to the count on the disk."""
NEAR_SHARE: Final = 0.8
"""From this share of the cap on, state is reduced."""
LEAVE_SHARE: Final = 0.98
"""At this share of the cap the provider leaves: to hand a stage over takes data too."""
MIN_STATE_SHARE: Final = 0.2
"""Share of its usual rate that state keeps until the provider leaves."""


def state_share(used_bytes: float, cap_bytes: float) -> tuple[float, str]:
    """Share of its usual rate that state may take with this much of the cap used, and why; 0: the cap is reached."""
    used = used_bytes / cap_bytes if cap_bytes > 0 else math.inf
    words = f"{byte_size(used_bytes)} of {byte_size(cap_bytes)} were used this month"
    if used >= LEAVE_SHARE:
        return 0.0, f"{words}, and the rest is kept for leaving: the monthly cap is reached"
    if used < NEAR_SHARE:
        return 1.0, words
    return max(MIN_STATE_SHARE, (LEAVE_SHARE - used) / (LEAVE_SHARE - NEAR_SHARE)), f"{words}: state is reduced"


class MonthlyCount:
    """Count of the traffic of a calendar month, in a file that the providers of one user share."""

    def __init__(
        self,
        folder: Path,
        month: Callable[[], str] = lambda: time.strftime("%Y-%m"),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` prints lines for the user."""
        self._path = folder / "traffic.json"
        self._month = month
        self._say = say

    def add(self, size_bytes: int) -> int:
        """Adds to the count of the current month. Returns the count; RunError when the file cannot be used."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A file of its own, because the count is replaced. The lock ends with the open file.
            with self._path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                total = self._read() + size_bytes
                self._write(json.dumps({"month": self._month(), "bytes": total}))
                return total
        except OSError as error:
            raise RunError(
                f"cannot count this month's traffic in {self._path}: {error}; check the file, or join without "
                "--monthly-cap"
            ) from None

    def _read(self) -> int:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        try:
            return _count_of(text, self._month())
        except (ValueError, RecursionError) as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            self._say(
                f"the count of this month's traffic in {self._path} was damaged ({error}) and begins again at 0; the "
                f"old file is {aside}. Lower --monthly-cap if much of this month's data is used"
            )
            return 0

    def _write(self, text: str) -> None:
        """Replaces the count in one step, so that it is whole whenever this process is killed."""
        written = self._path.with_suffix(".new")
        with written.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._path)


class MonthlyCap:
    """The cap of one provider."""

    def __init__(self, cap_bytes: float, count: MonthlyCount, traffic: Traffic, budget: StateBudget) -> None:
        self._cap_bytes = cap_bytes
        self._count = count
        self._traffic = traffic
        self._budget = budget
        self._counted_bytes = 0

    def check(self) -> None:
        """RunError when the cap is reached already, or the count cannot be used."""
        share, reason = self.update()
        if share <= 0:
            raise RunError(f"{reason}; raise --monthly-cap, or join again next month")

    def update(self) -> tuple[float, str]:
        """Counts the traffic since the last call, and reduces state when the cap is near. Returns `state_share`."""
        total = self._traffic.total_bytes
        used = self._count.add(total - self._counted_bytes)
        self._counted_bytes = total
        share, reason = state_share(used, self._cap_bytes)
        self._budget.reduce(share)
        return share, reason

    async def watch(self, on_reached: Callable[[str], None], say: Callable[[str], None]) -> None:
        """Calls `on_reached` with the reason, once, when the cap is reached; `say` prints lines for the user. Runs
        until it is cancelled; RunError when the count cannot be used."""
        is_near = is_reached = False
        while True:
            share, reason = await in_thread(self.update)
            if share <= 0 and not is_reached:
                is_reached = True
                say(reason)
                on_reached(reason)
            elif 0 < share < 1 and not is_near:
                is_near = True
                say(reason)
            await asyncio.sleep(LOOK_SECONDS)


def _count_of(text: bytes, month: str) -> int:
    """The count in the file for this month; 0 for another month. ValueError for a damaged file."""
    kept = json.loads(text)
    if not isinstance(kept, dict) or type(kept.get("bytes")) is not int or kept["bytes"] < 0:
        raise ValueError("it is not a count of bytes")
    return int(kept["bytes"]) if kept.get("month") == month else 0
