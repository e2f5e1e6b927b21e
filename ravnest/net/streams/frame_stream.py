"""Streams of frames (Link) or of protobuf messages (Control) over one gRPC stream. Both ends use the same classes."""

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from ravnest.errors import PeerError, RefusedError
from ravnest.net.frame_limits import DEFAULT_LIMITS, FrameLimits
from ravnest.net.frames.decoding import decode_at
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame
from ravnest.net.streams.messages import message_bytes, read_message
from ravnest.net.streams.stream import ByteStream
from ravnest.net.streams.wire import Wire

SentT = TypeVar("SentT", bound=Message)
ReceivedT = TypeVar("ReceivedT", bound=Message)


class _End:
    """One end of a stream."""

    def __init__(self, wire: Wire, *, batch: bool) -> None:
        self.stream = ByteStream(wire, batch=batch)

    @property
    def peer(self) -> str:
        """The other end: the node's id if it has proved one, otherwise its address."""
        return self.stream.peer

    async def close(self) -> None:
        """Deliver everything that was sent, and announce the end. The peer may go on sending. Idempotent."""
        await self.stream.close()


class Link(_End):
    """One stream of frames in both directions, in order.

    - A slow peer makes `send` wait, so frames do not pile up.
    - After a broken connection, or a bad frame from the peer, `receive` and `send` raise PeerError.
    - Cancelling `send` or `receive` does not harm the stream.
    """

    def __init__(self, wire: Wire, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        super().__init__(wire, batch=True)
        self.label = wire.label
        """The purpose of the stream as the dialling side gives it: the name of the link that it carries."""
        self.peer_host = wire.host
        """The host from which the other end dialled; empty on the dialling side."""
        self._limits = limits
        self._message = b""
        self._offset = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames handed to the connection so far."""
        return self.stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of frames that have arrived so far."""
        return self.stream.bytes_received

    def watch_writing(self, written: Callable[[int], None]) -> None:
        """Call `written` with `bytes_sent` whenever it has grown, from now on."""
        self.stream.on_written = written

    async def send(self, frame: Frame) -> None:
        """Send a frame, waiting while the peer is slow. Raises PeerError when the link is broken or closed.

        The tensors have been read when this returns, so the caller may change them.
        """
        await self.send_encoded(encode(frame, self._limits))

    async def send_encoded(self, data: bytes) -> None:
        """The same for a frame that is encoded already."""
        await self.stream.send(data)

    async def receive(self) -> Frame | None:
        """The next frame; None at the peer's orderly end. Raises PeerError when the link broke or the frame is bad."""
        if self._offset >= len(self._message):
            message = await self.stream.receive()
            if message is None:
                return None
            self._message, self._offset = message, 0
        try:
            frame, self._offset = decode_at(self._message, self._offset, self._limits)
        except PeerError as error:
            refused = RefusedError(f"{self.peer} sent a bad frame: {error}")
            self._message, self._offset = b"", 0
            self.stream.discard(refused)
            raise refused from None
        if self._offset >= len(self._message):
            # From here on only the frame's own tensors keep the message alive.
            self._message, self._offset = b"", 0
        return frame

    def abort(self, why: PeerError | None = None) -> None:
        """End the stream at once, both ways. The peer sees a broken link, and gets the reason if it dialled."""
        self.stream.fail(why or PeerError(f"the link to {self.peer} was closed on this side"))


class RelayEnd(_End):
    """One stream of messages for another node, which are passed on unread."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, batch=False)
        self.label = wire.label
        """The name of the link that the messages belong to."""


class Control(_End, Generic[SentT, ReceivedT]):
    """One stream of protobuf messages in both directions, in order; fails as a Link does."""

    def __init__(self, wire: Wire, received: type[ReceivedT]) -> None:
        super().__init__(wire, batch=False)
        self._received = received

    async def send(self, message: SentT) -> None:
        """Send a message, waiting while the peer is slow. Raises PeerError when the stream is broken or closed."""
        await self.stream.send(message_bytes(message, self.peer))

    async def receive(self) -> ReceivedT | None:
        """The next message; None at the peer's orderly end. Raises PeerError when the stream is broken or the message
        is bad."""
        data = await self.stream.receive()
        if data is None:
            return None
        try:
            return read_message(self._received, data, self.peer)
        except RefusedError as refused:
            self.stream.discard(refused)
            raise

    def abort(self) -> None:
        """End the stream at once, both ways; the peer sees a broken stream."""
        self.stream.fail(PeerError(f"the stream to {self.peer} was closed on this side"))
