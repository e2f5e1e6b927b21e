"""Queues of a byte stream: messages that wait for the connection, and messages that wait for their receiver.

Both are bounded: a sender waits while the outgoing queue is full, and the task that reads the connection waits while
the incoming one is full. Both belong to one event loop.
"""

import asyncio
from collections import deque
from typing import Final

from ravnest.errors import PeerError

QUEUE_BYTES: Final = 1 << 20
"""Limit of each queue; one message may exceed it."""

BATCH_BYTES: Final = 1 << 16
"""Small messages that wait together are joined into one of up to this size."""


class Wakeup:
    """A task that waits until another task wakes it."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutgoingQueue:
    """Messages that wait for the connection, and the senders that wait for room."""

    def __init__(self) -> None:
        self.error: PeerError | None = None
        """Why nothing more can be sent, if something went wrong."""
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._senders: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._added = Wakeup()

    def __len__(self) -> int:
        return len(self._messages)

    async def put(self, message: bytes) -> None:
        """Add a message, waiting while the queue is full. PeerError when it was stopped meanwhile."""
        if self._bytes < QUEUE_BYTES and not self._senders:
            self._add(message)
            return
        admitted = asyncio.get_running_loop().create_future()
        place = (message, admitted)
        self._senders.append(place)
        try:
            await admitted
        except asyncio.CancelledError:
            if place in self._senders:
                self._senders.remove(place)
            raise

    def take(self, batch: bool) -> bytes:
        """The next message; with `batch`, joined with the small ones after it."""
        message = self._messages.popleft()
        size = len(message)
        if batch and self._messages and size + len(self._messages[0]) <= BATCH_BYTES:
            together = [message]
            while self._messages and size + len(self._messages[0]) <= BATCH_BYTES:
                together.append(self._messages.popleft())
                size += len(together[-1])
            message = b"".join(together)
        self._bytes -= size
        while self._senders and self._bytes < QUEUE_BYTES:
            waiting, admitted = self._senders.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._messages.append(waiting)
                self._bytes += len(waiting)
        return message

    def stop(self, error: PeerError) -> None:
        """Drop everything that waits. The first error given is the one that senders get."""
        if self.error is None:
            self.error = error
        while self._senders:
            _, admitted = self._senders.popleft()
            if not admitted.done():
                admitted.set_exception(PeerError(str(self.error)))
        self._messages.clear()
        self._bytes = 0

    async def wait(self) -> None:
        """Wait until there may be a message, or `wake` was called."""
        await self._added.wait()

    def wake(self) -> None:
        self._added.wake()

    def _add(self, message: bytes) -> None:
        self._messages.append(message)
        self._bytes += len(message)
        self._added.wake()


class IncomingQueue:
    """Messages that arrived and were not received yet."""

    def __init__(self) -> None:
        self.has_ended = False
        """Whether the peer has ended the stream in order."""
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._added = Wakeup()
        self._taken = Wakeup()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._bytes += len(message)
        self._added.wake()

    def take(self) -> bytes:
        message = self._messages.popleft()
        self._bytes -= len(message)
        if self._bytes < QUEUE_BYTES:
            self._taken.wake()
        return message

    def end(self) -> None:
        """The peer has ended the stream in order."""
        self.has_ended = True
        self._added.wake()

    def clear(self) -> None:
        """Drop everything that arrived, also the end."""
        self._messages.clear()
        self._bytes = 0
        self.has_ended = False

    async def wait(self) -> None:
        """Wait until there may be a message, or `wake` was called."""
        await self._added.wait()

    def wake(self) -> None:
        self._added.wake()

    async def wait_for_room(self) -> None:
        while self._bytes >= QUEUE_BYTES:
            await self._taken.wait()
