"""Byte stream: messages in both directions over one gRPC stream, with a bounded queue on each side.

Two tasks own the gRPC stream, one reading and one writing, because cancelling a read or a write of grpc.aio ends the
whole call. Behind the queues, `send` and `receive` can be cancelled like any other await. On failure:

- the peer or the connection breaks: messages that had arrived are still received, then both methods raise PeerError;
- the peer ends the stream in order: `receive` returns None, and `send` raises PeerError if the peer is the called side;
- the peer is slow: `send` waits, and this side holds QUEUE_BYTES and one message for it at most.
"""

import asyncio
from collections.abc import Callable

from ravnest.errors import PeerError
from ravnest.net.pacing.traffic_limit import TRAFFIC
from ravnest.net.streams.queues import IncomingQueue, OutgoingQueue
from ravnest.net.streams.wire import Wire


class ByteStream:
    """One end of a stream of byte messages. `batch`: the peer accepts messages that are joined together."""

    def __init__(self, wire: Wire, batch: bool) -> None:
        self.peer = wire.peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self.error: PeerError | None = None
        """Why the stream is broken, once it is."""
        self.on_written: Callable[[int], None] = lambda bytes_sent: None
        """Called with `bytes_sent` whenever it has grown."""
        self._wire = wire
        self._batch = batch
        self._outgoing = OutgoingQueue()
        self._incoming = IncomingQueue()
        self._closing = False
        self._refusal: PeerError | None = None
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read_all())
        self._writer = loop.create_task(self._write_all())
        self._cleanup = loop.create_task(self._clean_up())

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting while the queue is full. Raises PeerError when it cannot be delivered."""
        error = self._outgoing.error
        if error is not None:
            raise type(error)(str(error))
        if self._closing:
            raise PeerError(f"the stream to {self.peer} is closed on this side; nothing more can be sent on it")
        await self._outgoing.put(message)

    async def receive(self) -> bytes | None:
        """The next message; None after the peer's orderly end. Raises PeerError once the stream is broken.

        One receiver at a time.
        """
        while not self._incoming:
            if self._incoming.has_ended:
                return None
            if self.error is not None:
                raise type(self.error)(str(self.error))
            await self._incoming.wait()
        return self._incoming.take()

    async def close(self, refusal: PeerError | None = None) -> None:
        """Deliver everything that is queued and end this side. Returns at once when the stream is over already.

        Only the called side may give a `refusal`, which the caller gets as a PeerError.
        """
        if not self._closing:
            self._closing = True
            self._refusal = refusal
        self._outgoing.wake()
        await asyncio.wait({self._writer})

    def fail(self, error: PeerError) -> None:
        """Break the stream, for both ends. Messages that had arrived before can still be received."""
        if self.error is None and not self._cleanup.done():
            self.error = error
        self._outgoing.stop(error)
        self._incoming.wake()
        for task in (self._reader, self._writer):
            if task is not asyncio.current_task():
                task.cancel()

    def discard(self, error: PeerError) -> None:
        """Break the stream because of something that the peer sent, and drop the messages after it."""
        self._incoming.clear()
        self.error = error
        self.fail(error)

    async def finished(self) -> None:
        """Wait until the stream is over both ways and has released its connection."""
        await asyncio.wait({self._cleanup})

    async def _read_all(self) -> None:
        try:
            while True:
                await self._incoming.wait_for_room()
                message = await self._wire.read()
                if message is None:
                    break
                size_bytes = len(message)
                self.bytes_received += size_bytes
                self._incoming.put(message)
                # The next message may take long to arrive.
                del message
                await TRAFFIC.received.turn(size_bytes)
            self._incoming.end()
            if self._wire.dialled:
                self._outgoing.stop(PeerError(f"{self.peer} has ended the stream"))
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
                            self._incoming.end()
                            self._reader.cancel()
                        return
                    await self._outgoing.wait()
                message = self._outgoing.take(self._batch)
                await TRAFFIC.sent.turn(len(message))
                await self._wire.write(message)
                self.bytes_sent += len(message)
                del message
                self.on_written(self.bytes_sent)
        except PeerError as error:
            self._outgoing.stop(error)
            # The dialling side learns by reading why the call is over; the called side cannot.
            if not self._wire.dialled:
                self.fail(error)

    async def _clean_up(self) -> None:
        try:
            await asyncio.wait({self._reader, self._writer})
        finally:
            if not self._incoming.has_ended and self.error is None:
                self.fail(PeerError(f"the connection to {self.peer} was closed on this side"))
            self._outgoing.stop(PeerError(f"the stream to {self.peer} is closed"))
            await self._wire.release()
