"""Carrier of a resumable link: one connection, from the exchange of counts until it breaks or the link is over.

A peer that breaks the protocol gets a RefusedError; any other failure of the connection is a PeerError.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ravnest.background import cancel_and_wait
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.foreground import Foreground
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.link_state import LinkState, memory_bytes

ACK_FRAMES: Final = 8
ACK_BYTES: Final = 4 << 20
ACK_SECONDS: Final = 0.05
"""Received frames are confirmed after this number of frames, bytes or seconds, whichever comes first."""

_TIMED_BYTES: Final = 64 << 10
"""Frames of this size show how fast the line is: for smaller ones the confirmation takes longer than the frame."""

RESUME_SECONDS: Final = 30.0
"""Timeout of the other end's count. It is longer than the way to a relay may take."""

OnWritten = Callable[[list[int]], None]
"""Called with the numbers of the frames whose bytes a connection has written, counted from 0."""


class LinkCarrier:
    """Carries a link over one connection."""

    def __init__(
        self, state: LinkState, connection: Link, on_written: OnWritten | None, foreground: Foreground | None = None
    ) -> None:
        self.connection = connection
        self.has_resumed = False
        """Whether the other end has told its count over this connection."""
        self._state = state
        self._on_written = on_written
        self._foreground = foreground
        self._position = 0
        """Number of the next frame to send."""
        self._told = 0
        """The count that the other end was told last."""
        self._untold_bytes = 0
        """Memory of the frames that arrived since then."""
        self._handed_bytes = 0
        self._written_bytes = 0
        self._timed: deque[tuple[int, int, float]] = deque()
        """Large frames that are not confirmed: number, size, and when they were handed to the connection."""
        self._being_written: deque[tuple[int, int]] = deque()
        """For each frame on its way, the byte of the connection at which it ends, and its number."""
        if on_written is not None or foreground is not None:
            connection.watch_writing(self._written)

    async def run(self) -> None:
        """Carry the link until it is over, or raise PeerError when the connection breaks."""
        await self._resume()
        await self._pump()
        await self.connection.close()

    def end(self) -> None:
        """Close the connection at once, and report no more written frames."""
        self._being_written.clear()
        self._on_written = None
        if self._foreground is not None:
            self._foreground.dropped(self._handed_bytes - self._written_bytes)
            self._foreground = None
        self.connection.abort()

    async def _resume(self) -> None:
        """Exchange counts. The timeout keeps a silent peer from occupying its link."""
        state, told = self._state, self._state.received.arrived
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                await self._send(encode(Frame(FrameKind.RESUME, told)))
                frame = await self.connection.receive()
        except TimeoutError:
            raise PeerError(f"{state.peer} did not say how many frames it has within {RESUME_SECONDS:.0f} s") from None
        if frame is None:
            raise PeerError(f"the connection to {state.peer} has ended")
        if frame.kind is not FrameKind.RESUME:
            raise self._broken_rule("did not begin by saying how many frames it has")
        self._take_count(frame, state.sent.handed_over)
        self._told, self._position = told, frame.microbatch
        self.has_resumed = True
        state.last_received_at, state.broken_at = time.monotonic(), None
        state.connections += 1
        state.notify()

    async def _pump(self) -> None:
        """Write and read until the connection breaks or the link is over."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                # The other end has ended the link, and waits for the confirmation of that.
                await asyncio.wait({writing})
            writing.result()
        finally:
            await cancel_and_wait(reading, writing)

    async def _write(self) -> None:
        """Send the frames that the other end does not have, and counts of the frames that arrived."""
        state = self._state
        late: asyncio.TimerHandle | None = None
        is_due = False

        def on_due() -> None:
            nonlocal is_due
            is_due = True
            state.notify()

        while True:
            behind = state.received.arrived - self._told
            if behind and (is_due or state.is_over or behind >= ACK_FRAMES or self._untold_bytes >= ACK_BYTES):
                self._told, self._untold_bytes, is_due = state.received.arrived, 0, False
                if late is not None:
                    late.cancel()
                    late = None
                await self._send_count()
            elif self._position < state.sent.total:
                number, self._position = self._position, self._position + 1
                await self._send(state.sent.take(number), number)
            elif state.is_over and not behind:
                return
            else:
                if behind and late is None:
                    late = asyncio.get_running_loop().call_later(ACK_SECONDS, on_due)
                if not await state.change_within(state.beat_seconds):
                    await self._send_count()

    async def _send_count(self) -> None:
        await self._send(encode(Frame(FrameKind.ACK, self._told)))

    async def _send(self, data: bytes, number: int | None = None) -> None:
        self._handed_bytes += len(data)
        if number is not None and self._on_written is not None:
            self._being_written.append((self._handed_bytes, number))
        if self._foreground is not None:
            self._foreground.queued(len(data))
            if number is not None and len(data) >= _TIMED_BYTES:
                self._timed.append((number, len(data), time.monotonic()))
        await self.connection.send_encoded(data)

    def _written(self, sent_bytes: int) -> None:
        if self._foreground is not None:
            self._foreground.written(sent_bytes - self._written_bytes)
        self._written_bytes = sent_bytes
        numbers = []
        while self._being_written and self._being_written[0][0] <= sent_bytes:
            numbers.append(self._being_written.popleft()[1])
        if numbers and self._on_written is not None:
            self._on_written(numbers)

    async def _read(self) -> None:
        state = self._state
        while not state.is_over:
            while state.received.is_full:
                await state.change()
            frame = await self.connection.receive()
            if frame is None:
                raise PeerError(f"the connection to {state.peer} has ended")
            state.last_received_at = time.monotonic()
            if frame.kind is FrameKind.ACK:
                self._take_count(frame, self._position)
            elif frame.kind is FrameKind.RESUME:
                raise self._broken_rule("sent its count twice over one connection")
            else:
                self._take_frame(frame)
            # The next frame may take long to arrive.
            del frame
            state.notify()

    def _take_frame(self, frame: Frame) -> None:
        state = self._state
        state.received.arrived += 1
        self._untold_bytes += memory_bytes(frame)
        if frame.kind is FrameKind.END:
            self._check_empty(frame)
            state.has_ended = True
        else:
            state.received.put(frame)

    def _take_count(self, frame: Frame, max_count: int) -> None:
        """Forget the frames that the other end says it has, which are `max_count` at most."""
        self._check_empty(frame)
        count, confirmed = frame.microbatch, self._state.sent.confirmed
        if not confirmed <= count <= max_count:
            raise self._broken_rule(f"confirms {count} frames, {confirmed} to {max_count} are possible")
        self._state.sent.confirm(count)
        while self._timed and self._timed[0][0] < count:
            _, size_bytes, sent_at = self._timed.popleft()
            if self._foreground is not None:
                self._foreground.delivered(size_bytes, time.monotonic() - sent_at)
        self._state.notify()

    def _check_empty(self, frame: Frame) -> None:
        # Its values would lie in memory without being counted, for as long as a frame of the same message is kept.
        if frame.tensors or frame.scalars or frame.coded:
            raise self._broken_rule(f"sent a {frame.kind.name} frame that carries values")

    def _broken_rule(self, what: str) -> PeerError:
        return RefusedError(f"{self._state.peer} {what}; the link is given up")
