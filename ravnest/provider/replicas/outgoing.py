"""State that this provider is sending at the moment: what, how much of it has got through, and since when.

The heartbeat says so, for the coordinator not to give up a stage that is at work, and to tell the user what the others
wait for. A transfer counts what the other end has confirmed; of an upload, what the connection has taken.
"""

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from ravnest.net.v1.control_pb2 import Transfer

MAX_TOLD: Final = 16
"""Transfers in one report."""


class OutgoingTransfer:
    """One transfer under way. Its methods belong to the network's loop."""

    def __init__(self, kind: str, name: str, total_bytes: int) -> None:
        self._kind = kind
        self._name = name
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._began = self._moved_at = time.monotonic()

    def reached(self, done_bytes: int) -> None:
        """This much has got through, of all of it."""
        if done_bytes > self._done_bytes:
            self._moved_at = time.monotonic()
        self._done_bytes = done_bytes

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks for a connection that asks for the next once it has taken the one before; from the first
        one on, also where they are sent again."""
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
    """All that are under way. Transfers begin and end on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[OutgoingTransfer] = []

    @contextlib.contextmanager
    def sending(self, kind: str, name: str, total_bytes: int) -> Iterator[OutgoingTransfer]:
        """A transfer that lasts as long as the block. `kind` and `name` are as `Transfer` has them."""
        sending = OutgoingTransfer(kind, name, total_bytes)
        with self._lock:
            self._under_way.append(sending)
        try:
            yield sending
        finally:
            with self._lock:
                self._under_way.remove(sending)

    def moved_within(self, seconds: float) -> bool:
        """Whether some transfer is under way of which something got through so lately."""
        with self._lock:
            return any(sending.still_seconds < seconds for sending in self._under_way)

    def told(self) -> list[Transfer]:
        """What the heartbeat says."""
        with self._lock:
            return [sending.told() for sending in self._under_way[:MAX_TOLD]]
