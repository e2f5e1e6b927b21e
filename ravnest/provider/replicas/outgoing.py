"""Outgoing transfers of state: what this provider is sending, how much of it has arrived, and since when.

The heartbeat reports them. The coordinator then does not give up a stage that is busy sending, and the user sees what
the others wait for. A transfer counts confirmed bytes; an upload counts bytes that the connection has accepted. All of
them take their turns in one budget.
"""

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from ravnest.net.pacing.budget import StateBudget
from ravnest.net.v1.control_pb2 import Transfer

MAX_TOLD: Final = 16
"""Maximum number of transfers in one report."""


class OutgoingTransfer:
    """One transfer. The network's loop calls its methods."""

    def __init__(self, kind: str, name: str, total_bytes: int) -> None:
        self._kind = kind
        self._name = name
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._began = self._moved_at = time.monotonic()

    def reached(self, done_bytes: int) -> None:
        """This much of it has arrived in total."""
        if done_bytes > self._done_bytes:
            self._moved_at = time.monotonic()
        self._done_bytes = done_bytes

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks, counted when the connection asks for the next one; the count starts over on a retry."""
        done = 0
        self.reached(0)
        async for data in chunks:
            yield data
            done += len(data)
            self.reached(done)

    @property
    def still_seconds(self) -> float:
        return time.monotonic() - self._moved_at

    def told(self) -> Transfer:
        now = time.monotonic()
        return Transfer(
            kind=self._kind,
            name=self._name,
            done_bytes=self._done_bytes,
            total_bytes=self._total_bytes,
            seconds=now - self._began,
            still_seconds=self.still_seconds,
        )


class OutgoingTransfers:
    """All current transfers. They begin and end on any thread."""

    def __init__(self, budget: StateBudget | None = None) -> None:
        """Without a `budget` nothing waits."""
        self.budget = budget or StateBudget.unlimited()
        """State waits here for its turn on the line."""
        self._lock = threading.Lock()
        self._under_way: list[OutgoingTransfer] = []

    @contextlib.contextmanager
    def sending(self, kind: str, name: str, total_bytes: int) -> Iterator[OutgoingTransfer]:
        """A transfer that lasts as long as the block. `kind` and `name` are those of `Transfer`."""
        sending = OutgoingTransfer(kind, name, total_bytes)
        with self._lock:
            self._under_way.append(sending)
        try:
            yield sending
        finally:
            with self._lock:
                self._under_way.remove(sending)

    def moved_within(self, seconds: float) -> bool:
        """Whether some current transfer made progress within this time."""
        with self._lock:
            return any(sending.still_seconds < seconds for sending in self._under_way)

    def told(self) -> list[Transfer]:
        """The transfers for the heartbeat."""
        with self._lock:
            return [sending.told() for sending in self._under_way[:MAX_TOLD]]
