"""State of a resumable link that outlives its connections: frames in both directions, and how the link ended."""

import asyncio
import contextlib
import time
from collections import deque
from typing import Final, Generic, TypeVar

from ravnest.errors import PeerError
from ravnest.net.frames.frames import Frame

_ENTRY_BYTES: Final = 128
"""Memory of an entry in the send window besides the frame's bytes, so that many small frames count too."""
_FRAME_BYTES: Final = 512
_VALUE_BYTES: Final = 512
"""Memory of the objects of a received frame, and of each value with its name."""

T = TypeVar("T")


class _Window(Generic[T]):
    """Frames in one direction of a link, up to a limit of their memory."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._frames: deque[T] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._window_bytes


class SendWindow(_Window[bytes]):
    """Encoded frames that the other end has not confirmed, numbered from 0 over the life of the link."""

    def __init__(self, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self.confirmed = 0
        """Frames that the other end has confirmed."""
        self.handed_over = 0
        """Frames that some connection was given: no more than these can have arrived."""

    @property
    def total(self) -> int:
        """Frames that were added so far."""
        return self.confirmed + len(self._frames)

    def add(self, data: bytes) -> None:
        """Keep an encoded frame until the other end confirms it."""
        self._frames.append(data)
        self._bytes += len(data) + _ENTRY_BYTES

    def take(self, number: int) -> bytes:
        """The frame of this number, for a connection to send."""
        self.handed_over = max(self.handed_over, number + 1)
        return self._frames[number - self.confirmed]

    def confirm(self, count: int) -> None:
        """Forget the first `count` frames: the other end has them."""
        while self.confirmed < count:
            self._bytes -= len(self._frames.popleft()) + _ENTRY_BYTES
            self.confirmed += 1


class ReceiveWindow(_Window[Frame]):
    """Frames that arrived and that no receiver has taken yet."""

    def __init__(self, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self.arrived = 0
        """Frames that arrived so far, with the one that ends the link."""

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._bytes += memory_bytes(frame)

    def take(self) -> Frame:
        frame = self._frames.popleft()
        self._bytes -= memory_bytes(frame)
        return frame


class LinkState:
    """Everything about one end of a link that its connections share. Used on the network's loop."""

    def __init__(self, peer: str, window_bytes: int) -> None:
        self.peer = peer
        self.sent = SendWindow(window_bytes)
        self.received = ReceiveWindow(window_bytes)
        self.connections = 0
        """Connections that have carried the link so far."""
        self.last_received_at = time.monotonic()
        """The time of the last frame from the other end; initially, the time when the link was made."""
        self.broken_at: float | None = self.last_received_at
        """The time since which no connection carries the link, by the same clock; None while one does."""
        self.beat_seconds: float | None = None
        """Longest silence of this end: after this time without a frame to send, the count is sent again. None: any."""
        self.error: PeerError | None = None
        """Why the link has failed for good."""
        self.is_closing = False
        """Whether this end has announced that it sends nothing more."""
        self.has_ended = False
        """Whether the other end has announced that it sends nothing more."""
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the link has ended or failed: it will carry nothing more."""
        return self.error is not None or (self.is_closing and not self.sent) or self.has_ended

    def failure(self) -> PeerError:
        """A new error with the reason why the link has failed, for one more caller."""
        assert self.error is not None
        return type(self.error)(str(self.error))

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until something about the link changes."""
        await self._changed.wait()

    async def change_within(self, seconds: float | None) -> bool:
        """Wait for a change with a timeout, None: without one. Whether there was a change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.change()
                return True
        return False


def memory_bytes(frame: Frame) -> int:
    """Approximate memory of a received frame, so that many nearly empty ones count as well."""
    values = len(frame.tensors) + len(frame.scalars) + len(frame.coded)
    tensor_bytes = sum(tensor.nbytes for tensor in frame.tensors.values())
    coded_bytes = sum(coded.data.nbytes for coded in frame.coded.values())
    return _FRAME_BYTES + values * _VALUE_BYTES + tensor_bytes + coded_bytes
