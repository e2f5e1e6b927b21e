"""Limits that a user sets for the traffic of a process, in each direction, and counters of that traffic.

They hold for everything that the process sends and receives: activations too, not only state. There is one object for
the process, `TRAFFIC`, as there is one network: a connection of any kind is made with it, and none can be forgotten. A
message is sent whole, and the next one waits until the average is back at the limit. The other end of a connection
stops sending while this process does not read.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_PAYLOAD_SHARE: Final = 0.95
"""Share of a limit for messages; the rest is for TLS, HTTP/2 and TCP."""
_SMALL_BYTES: Final = 4 << 10
"""Smaller messages are counted and do not wait: heartbeats and confirmations must not queue behind state."""
_LOOK_SECONDS: Final = 1.0
MIN_RATE: Final = 10_000
"""Smallest limit in bytes per second: heartbeats and reports alone need some of it."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Limits for the traffic of this machine, as its user sets them."""

    upload_bytes_per_second: float = math.inf
    download_bytes_per_second: float = math.inf
    monthly_bytes: float = math.inf
    """Sent and received together, in one calendar month."""


NO_LIMITS: Final = UserLimits()


class RateLimit:
    """One direction. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = 0
        """Bytes that have passed so far."""
        self._clock = clock
        self._bytes_per_second = math.inf
        self._free_at = -math.inf
        self._lock = threading.Lock()

    def set(self, bytes_per_second: float) -> None:
        """Limit the rate from now on; infinite: no limit."""
        with self._lock:
            self._bytes_per_second = bytes_per_second

    def take(self, size_bytes: int) -> float:
        """Count a message. Returns the time to wait, before it is sent or after it was received."""
        with self._lock:
            self.total_bytes += size_bytes
            if not math.isfinite(self._bytes_per_second):
                return 0.0
            now = self._clock()
            free_at = max(now, self._free_at)
            self._free_at = free_at + size_bytes / (_PAYLOAD_SHARE * self._bytes_per_second)
            return 0.0 if size_bytes < _SMALL_BYTES else free_at - now

    async def turn(self, size_bytes: int) -> None:
        """Count a message, and wait while the rate is above the limit."""
        wait_seconds = self.take(size_bytes)
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)

    def wait_turn(self, size_bytes: int, is_over: Callable[[], bool]) -> None:
        """The same for a thread. Returns early once `is_over`."""
        wait_seconds, woken = self.take(size_bytes), threading.Event()
        while wait_seconds > 0 and not is_over():
            woken.wait(min(wait_seconds, _LOOK_SECONDS))
            wait_seconds -= _LOOK_SECONDS


class Traffic:
    """Both directions of a process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sent = RateLimit(clock)
        self.received = RateLimit(clock)

    def limit(self, limits: UserLimits) -> None:
        """Hold to these limits from now on."""
        self.sent.set(limits.upload_bytes_per_second)
        self.received.set(limits.download_bytes_per_second)

    @property
    def total_bytes(self) -> int:
        """Bytes sent and received so far."""
        return self.sent.total_bytes + self.received.total_bytes


TRAFFIC: Final = Traffic()
"""The traffic of this process. Without limits until the command line sets some."""
