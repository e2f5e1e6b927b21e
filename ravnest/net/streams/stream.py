"""A stream of messages with bounded queues on both sides of it.

Two tasks own the gRPC stream, one reading and one writing, because cancelling a read or a write of grpc.aio ends
the whole call: behind the queues, `send` and `receive` can be cancelled like any other await. What fails:

- The peer or the connection breaks: what had arrived is still received, then `receive` and `send` raise PeerError.
- The peer ends the stream in order: `receive` returns None; if the peer is the called side, `send` raises PeerError.
- The peer is slow: `send` waits, and at most QUEUE_BYTES and one message are held for it here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ravnest.errors import PeerError
from ravnest.net.streams.wire import Wire

QUEUE_BYTES: Final = 1 << 20
"""A sender waits while this much is queued, the reader pauses while this much is unread; one message may exceed it."""

BATCH_BYTES: Final = 1 << 16
"""Small messages that wait together are written as one, up to this size."""


class ByteStream:
    """One end of a stream of byte messages. `batch`: the peer can take messages joined together."""

    def __init__(self, wire: Wire, batch: bool) -> None:
        self.peer = wire.peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self.error: PeerError | None = None
        """Why the stream is broken, once it is."""
        self.on_written: Callable[[int], None] | None = None
        """Called with `bytes_sent` whenever it has grown."""
        self._wire = wire
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._senders: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._send_error: PeerError | None = None
        self._closing = False
        self._refusal: PeerError | None = None
        self._incoming: deque[bytes] = deque()
        self._incoming_bytes = 0
        self._ended = False
        self._writer_wake: asyncio.Future[None] | None = None
        self._reader_wake: asyncio.Future[None] | None = None
        self._receiver_wake: asyncio.Future[None] | None = None
        self._reader = self._loop.create_task(self._read_all())
        self._writer = self._loop.create_task(self._write_all())
        self._keeper = self._loop.create_task(self._keep())

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting while the queue is full. Raises PeerError when it cannot be delivered."""
        self._check_sending()
        if self._outgoing_bytes < QUEUE_BYTES and not self._senders:
            self._enqueue(message)
            return
        admitted = self._loop.create_future()
        place = (message, admitted)
        self._senders.append(place)
        try:
            await admitted
        except asyncio.CancelledError:
            if place in self._senders:
                self._senders.remove(place)
            raise

    async def receive(self) -> bytes | None:
        """The next message; None after the peer's orderly end. Raises PeerError once the stream is broken.

        One receiver at a time.
        """
        while not self._incoming:
            if self._ended:
                return None
            if self.error is not None:
                raise type(self.error)(str(self.error))
            self._receiver_wake = self._loop.create_future()
            await self._receiver_wake
        message = self._incoming.popleft()
        self._incoming_bytes -= len(message)
        if self._incoming_bytes < QUEUE_BYTES:
            _wake(self._reader_wake)
        return message

    async def close(self, refusal: PeerError | None = None) -> None:
        """Deliver what is queued and end this side. Returns at once when the stream is over already.

        With a `refusal`, which the called side alone may give, the caller gets it as a PeerError.
        """
        if not self._closing:
            self._closing = True
            self._refusal = refusal
        _wake(self._writer_wake)
        await asyncio.wait({self._writer})

    def fail(self, error: PeerError) -> None:
        """Break the stream: both ends see it. What had arrived before can still be received."""
        if self.error is None and not self._keeper.done():
            self.error = error
        self._stop_sending(error)
        _wake(self._receiver_wake)
        for task in (self._reader, self._writer):
            if task is not asyncio.current_task():
                task.cancel()

    def discard(self, error: PeerError) -> None:
        """Break the stream because of what the peer sent: nothing more of it is taken."""
        self._incoming.clear()
        self._incoming_bytes = 0
        self._ended = False
        self.error = error
        self.fail(error)

    async def finished(self) -> None:
        """Returns when the stream is over both ways and has let go of the connection."""
        await asyncio.wait({self._keeper})

    async def _read_all(self) -> None:
        try:
            while True:
                while self._incoming_bytes >= QUEUE_BYTES:
                    self._reader_wake = self._loop.create_future()
                    await self._reader_wake
                message = await self._wire.read()
                if message is None:
                    break
                self.bytes_received += len(message)
                self._incoming.append(message)
                self._incoming_bytes += len(message)
                _wake(self._receiver_wake)
            self._end_reading()
            if self._wire.dialled:
                self._stop_sending(PeerError(f"{self.peer} has ended the stream"))
                self._writer.cancel()
        except PeerError as error:
            self.fail(error)

    async def _write_all(self) -> None:
        try:
            while True:
                while not self._outgoing:
                    if self._closing:
                        await self._wire.end(self._refusal)
                        if not self._wire.dialled:
                            self._end_reading()
                            self._reader.cancel()
                        return
                    self._writer_wake = self._loop.create_future()
                    await self._writer_wake
                message = self._next_message()
                await self._wire.write(message)
                self.bytes_sent += len(message)
                if self.on_written is not None:
                    self.on_written(self.bytes_sent)
        except PeerError as error:
            self._stop_sending(error)
            # The dialling side learns from reading why the call is over; the called side has nothing else to learn.
            if not self._wire.dialled:
                self.fail(error)

    async def _keep(self) -> None:
        try:
            await asyncio.wait({self._reader, self._writer})
        finally:
            if not self._ended and self.error is None:
                self.fail(PeerError(f"the connection to {self.peer} was closed on this side"))
            self._stop_sending(PeerError(f"the stream to {self.peer} is closed"))
            await self._wire.release()

    def _enqueue(self, message: bytes) -> None:
        self._outgoing.append(message)
        self._outgoing_bytes += len(message)
        _wake(self._writer_wake)

    def _next_message(self) -> bytes:
        message = self._outgoing.popleft()
        size = len(message)
        if self._batch and self._outgoing and size + len(self._outgoing[0]) <= BATCH_BYTES:
            together = [message]
            while self._outgoing and size + len(self._outgoing[0]) <= BATCH_BYTES:
                together.append(self._outgoing.popleft())
                size += len(together[-1])
            message = b"".join(together)
        self._outgoing_bytes -= size
        while self._senders and self._outgoing_bytes < QUEUE_BYTES:
            waiting, admitted = self._senders.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._outgoing.append(waiting)
                self._outgoing_bytes += len(waiting)
        return message

    def _check_sending(self) -> None:
        if self._send_error is not None:
            raise type(self._send_error)(str(self._send_error))
        if self._closing:
            raise PeerError(f"the stream to {self.peer} is closed on this side; nothing more can be sent on it")

    def _stop_sending(self, error: PeerError) -> None:
        if self._send_error is None:
            self._send_error = error
        while self._senders:
            _, admitted = self._senders.popleft()
            if not admitted.done():
                admitted.set_exception(PeerError(str(self._send_error)))
        self._outgoing.clear()
        self._outgoing_bytes = 0

    def _end_reading(self) -> None:
        self._ended = True
        _wake(self._receiver_wake)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
