"""A link that outlives its connections: frames arrive once, in order, whatever breaks in between.

Each end counts the frames it has got and keeps the bytes of those it has sent until the other end has counted them.
Whenever a new connection is made, both ends first say their counts, and each sends again what the other has not got. A
sender waits while too much is unconfirmed, so a link that is down holds its stage back rather than filling its memory.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from ravnest.background import cancel_and_wait
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.frames import Frame, FrameKind, encode

WINDOW_BYTES: Final = 64 << 20
"""A sender waits while this much is unconfirmed; one frame may exceed it."""

ACK_FRAMES: Final = 8
ACK_BYTES: Final = 4 << 20
ACK_SECONDS: Final = 0.05
"""What has arrived is confirmed after so many frames, bytes or seconds, whichever comes first."""

RESUME_SECONDS: Final = 30.0
"""How long the other end may take to say its count. Longer than it may take to come to a relay."""

_KEPT_BYTES: Final = 128
"""What a frame that is kept takes beyond its bytes, so that many small ones count too."""

FIRST_BACKOFF_SECONDS: Final = 0.1
SOON_BACKOFF_SECONDS: Final = 0.4
LAST_BACKOFF_SECONDS: Final = 2.0
_SOON_SECONDS: Final = 30.0


def longer_pause(pause_seconds: float, away_seconds: float) -> float:
    """How long to wait before the next try to reach somebody who has been away for so long.

    Whoever was killed is started again soon, or not for long, and everybody waits for the last one to notice.
    """
    most = SOON_BACKOFF_SECONDS if away_seconds < _SOON_SECONDS else LAST_BACKOFF_SECONDS
    return min(2 * pause_seconds, most)


class LinkConnection(Protocol):
    """What carries a link for a while: a Link of one gRPC stream."""

    async def send_encoded(self, data: bytes) -> None: ...

    async def receive(self) -> Frame | None: ...

    async def close(self) -> None: ...

    def abort(self, why: PeerError | None = None) -> None: ...

    def watch_writing(self, written: Callable[[int], None]) -> None: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...


class ResumableLink:
    """One end of a link. It carries frames while some connection is given to `carry`, and keeps them meanwhile.

    - `send` waits while too much is unconfirmed, and raises PeerError once the link is closed or has failed for good.
    - `receive` gives each frame once, None after the other end's `close`, and raises PeerError on failure for good.
    - A peer that breaks the rules of the protocol fails the link for good.
    """

    def __init__(self, peer: str, window_bytes: int | None = None) -> None:
        """A sender waits while `window_bytes` are unconfirmed, and what has arrived and was not taken is no more; None:
        WINDOW_BYTES."""
        self.peer = peer
        self._window_bytes = WINDOW_BYTES if window_bytes is None else window_bytes
        self.connections = 0
        """How many connections have carried this link so far."""
        self.last_received_at = time.monotonic()
        """When something last came from the other end; at first, when the link was made."""
        self.broken_at: float | None = self.last_received_at
        """Since when no connection carries the link, by the same clock; None while one does."""
        self.beat_seconds: float | None = None
        """After so long with nothing to send the other end is told again how much has arrived, so that it knows that
        this end is there; None: it is not."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._confirmed = 0
        self._sent = 0
        """Frames that were handed to some connection: no more can have arrived."""
        self._position = 0
        """The next frame for the connection at hand."""
        self._arrived = 0
        self._arrived_bytes = 0
        self._told = 0
        self._incoming: deque[Frame] = deque()
        self._incoming_bytes = 0
        self._error: PeerError | None = None
        self._closing = False
        self._ended = False
        self._connection: LinkConnection | None = None
        self._resumed = False
        """Whether the other end has said its count on the connection at hand."""
        self._past_bytes = [0, 0]
        self._changed = asyncio.Event()
        self.on_written: Callable[[list[int]], None] | None = None
        """Called with the numbers of frames, counted from 0, whose bytes a connection has taken together; None: nobody
        asks. To be set before there is a connection."""
        self._handed_bytes = 0
        self._being_written: deque[tuple[int, int]] = deque()
        """Of the connection at hand: up to which byte each frame goes, and its number."""

    @property
    def unconfirmed(self) -> int:
        """How many frames were given to `send` that the other end has not confirmed."""
        return len(self._kept)

    @property
    def frames_sent(self) -> int:
        """How many frames were given to `send` so far."""
        return self._confirmed + len(self._kept)

    @property
    def bytes_sent(self) -> int:
        return self._past_bytes[0] + (self._connection.bytes_sent if self._connection else 0)

    @property
    def bytes_received(self) -> int:
        return self._past_bytes[1] + (self._connection.bytes_received if self._connection else 0)

    @property
    def connected(self) -> bool:
        """Whether a connection carries the link: one over which the other end has said what it has."""
        return self._connection is not None and self._resumed

    @property
    def error(self) -> PeerError | None:
        """Why the link has failed for good, once it has."""
        return self._error

    async def until_connected(self) -> None:
        """Returns when a connection carries the link; PeerError when it has failed for good."""
        while not self.connected:
            if self._error is not None:
                raise self._failure()
            await self._change()

    async def until_disconnected(self) -> None:
        """Returns when no connection carries the link."""
        while self._connection is not None:
            await self._change()

    async def fail_when_gone(self, patience_seconds: float) -> None:
        """Fails the link once it has been without a connection for so long. Returns when the link is over."""
        while not self.over:
            if not self.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_seconds if math.isfinite(patience_seconds) else None):
                        while not self.connected and not self.over:
                            await self._change()
                    continue
                self.fail(PeerError(f"there has been no connection to {self.peer} for {patience_seconds:.0f} s"))
            else:
                await self._change()

    async def send(self, frame: Frame) -> None:
        """Sends a frame, waiting while too much is unconfirmed. Its tensors have been read when this returns."""
        await self._until_room()
        self._keep(encode(frame))

    async def send_encoded(self, data: bytes) -> None:
        """The same for a frame that has been encoded already, elsewhere than on the network's loop."""
        await self._until_room()
        self._keep(data)

    async def _until_room(self) -> None:
        while self._kept_bytes >= self._window_bytes and not self._closing and not self.over:
            await self._change()
        if self._error is not None:
            raise self._failure()
        if self._ended:
            raise PeerError(f"{self.peer} has ended the link")
        if self._closing:
            raise PeerError(f"the link to {self.peer} is closed on this side")

    async def receive(self) -> Frame | None:
        """The next frame, each once and in order; None after the other end's orderly end."""
        while not self._incoming:
            if self._ended:
                return None
            if self._error is not None:
                raise self._failure()
            await self._change()
        frame = self._incoming.popleft()
        self._incoming_bytes -= _size(frame)
        self._notify()
        return frame

    async def close(self) -> None:
        """Says that nothing more comes, and returns when the other end knows, has ended too, or the link has failed."""
        if not self._closing and not self.over:
            self._keep(encode(Frame(FrameKind.END, 0)))
        self._closing = True
        while not self.over:
            await self._change()

    def fail(self, error: PeerError) -> None:
        """The link is over for good. The other end, where it is connected, is told why if it broke the rules."""
        if self._error is None and not self._ended:
            self._error = error
        if self._connection is not None:
            self._connection.abort(error if isinstance(error, RefusedError) else None)
        self._notify()

    async def carry(self, connection: LinkConnection) -> None:
        """Runs the link over this connection until it breaks, which raises PeerError, or the link is over.

        A newer connection replaces an older one: the older may be dead without knowing it. A peer that breaks the rules
        fails the link for good.
        """
        if self._error is not None:
            raise self._failure()
        while self._connection is not None:
            # Again after each wait: several may come at once, and none of them is to wait for another.
            self._connection.abort()
            await self._change()
        self._connection = connection
        self._handed_bytes = 0
        self._being_written.clear()
        if self.on_written is not None:
            connection.watch_writing(lambda sent_bytes: self._written(connection, sent_bytes))
        try:
            await self._resume(connection)
            await self._pump(connection)
            await connection.close()
        except PeerError as error:
            if isinstance(error, RefusedError):
                self.fail(error)
            connection.abort(error)
            raise
        finally:
            self._past_bytes[0] += connection.bytes_sent
            self._past_bytes[1] += connection.bytes_received
            if self._resumed:
                self.broken_at = time.monotonic()
            self._connection, self._resumed = None, False
            connection.abort()
            self._notify()

    async def keep_dialling(self, dial: Callable[[], Awaitable[LinkConnection]]) -> None:
        """Carries the link over one connection after another, with growing pauses between failures, until it is over.

        Returns when the link is closed or has ended; raises PeerError when it has failed for good.
        """
        pause, since = FIRST_BACKOFF_SECONDS, time.monotonic()
        while not self.over:
            # Another connection may have come about: the other end dialled, or somebody found a better way.
            await self.until_disconnected()
            began = time.monotonic()
            try:
                await self.carry(await dial())
            except PeerError as error:
                if isinstance(error, RefusedError):
                    self.fail(error)
                if self._error is not None:
                    raise self._failure() from None
                if self.over:
                    return
                # A peer that takes connections and breaks them at once is not to be dialled without end.
                if time.monotonic() - began > LAST_BACKOFF_SECONDS:
                    pause, since = FIRST_BACKOFF_SECONDS, time.monotonic()
                await asyncio.sleep(pause)
                pause = longer_pause(pause, time.monotonic() - since)

    @property
    def over(self) -> bool:
        """Whether the link has ended or failed: it will carry nothing more."""
        return self._error is not None or (self._closing and not self._kept) or self._ended

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data) + _KEPT_BYTES
        self._notify()

    async def _resume(self, connection: LinkConnection) -> None:
        """Both ends say their counts; one that says nothing does not hold its link for itself."""
        told = self._arrived
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                await self._hand(connection, encode(Frame(FrameKind.RESUME, told)))
                frame = await connection.receive()
        except TimeoutError:
            raise PeerError(f"{self.peer} did not say how many frames it has within {RESUME_SECONDS:.0f} s") from None
        if frame is None:
            raise PeerError(f"the connection to {self.peer} has ended")
        if frame.kind is not FrameKind.RESUME:
            raise self._broken_rule("did not begin by saying how many frames it has")
        self._take_count(frame, self._sent)
        self._told, self._position = told, frame.microbatch
        self._resumed = True
        self.last_received_at, self.broken_at = time.monotonic(), None
        self.connections += 1
        self._notify()

    async def _pump(self, connection: LinkConnection) -> None:
        """Writes and reads until the connection breaks or the link is over."""
        writing = asyncio.create_task(self._write(connection))
        reading = asyncio.create_task(self._read(connection))
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                # The other end said that it is done: it still waits for the confirmation of that.
                await asyncio.wait({writing})
            writing.result()
        finally:
            await cancel_and_wait(reading, writing)

    async def _write(self, connection: LinkConnection) -> None:
        """Sends what the other end has not got, and counts of what has arrived, as they come up."""
        late: asyncio.TimerHandle | None = None
        due = False

        def now_due() -> None:
            nonlocal due
            due = True
            self._notify()

        while True:
            behind = self._arrived - self._told
            if behind and (due or self.over or behind >= ACK_FRAMES or self._arrived_bytes >= ACK_BYTES):
                self._told, self._arrived_bytes, due = self._arrived, 0, False
                if late is not None:
                    late.cancel()
                    late = None
                await self._hand(connection, encode(Frame(FrameKind.ACK, self._told)))
            elif self._position < self._confirmed + len(self._kept):
                data = self._kept[self._position - self._confirmed]
                self._position += 1
                self._sent = max(self._sent, self._position)
                await self._hand(connection, data, self._position - 1)
            elif self.over and not behind:
                return
            else:
                if behind and late is None:
                    late = asyncio.get_running_loop().call_later(ACK_SECONDS, now_due)
                if not await self._change_within(self.beat_seconds):
                    await self._hand(connection, encode(Frame(FrameKind.ACK, self._told)))

    async def _hand(self, connection: LinkConnection, data: bytes, number: int | None = None) -> None:
        self._handed_bytes += len(data)
        if number is not None and self.on_written is not None:
            self._being_written.append((self._handed_bytes, number))
        await connection.send_encoded(data)

    def _written(self, connection: LinkConnection, sent_bytes: int) -> None:
        numbers = []
        while connection is self._connection and self._being_written and self._being_written[0][0] <= sent_bytes:
            numbers.append(self._being_written.popleft()[1])
        if numbers and self.on_written is not None:
            self.on_written(numbers)

    async def _read(self, connection: LinkConnection) -> None:
        while not self.over:
            while self._incoming_bytes >= self._window_bytes:
                await self._change()
            frame = await connection.receive()
            if frame is None:
                raise PeerError(f"the connection to {self.peer} has ended")
            self.last_received_at = time.monotonic()
            if frame.kind is FrameKind.ACK:
                self._take_count(frame, self._position)
            elif frame.kind is FrameKind.RESUME:
                raise self._broken_rule("said its count in the middle of a connection")
            else:
                self._arrived += 1
                self._arrived_bytes += _size(frame)
                if frame.kind is FrameKind.END:
                    self._check_empty(frame)
                    self._ended = True
                else:
                    self._incoming.append(frame)
                    self._incoming_bytes += _size(frame)
            self._notify()

    def _take_count(self, frame: Frame, most: int) -> None:
        """Forgets what the other end says it has, which can be `most` frames; whatever else it says breaks a rule."""
        self._check_empty(frame)
        count = frame.microbatch
        if not self._confirmed <= count <= most:
            raise self._broken_rule(f"confirms {count} frames, {self._confirmed} to {most} are possible")
        while self._confirmed < count:
            self._kept_bytes -= len(self._kept.popleft()) + _KEPT_BYTES
            self._confirmed += 1
        self._notify()

    def _check_empty(self, frame: Frame) -> None:
        # What it carried would lie in memory uncounted, for as long as a frame of the same message is kept.
        if frame.tensors or frame.scalars or frame.coded:
            raise self._broken_rule(f"sent a {frame.kind.name} frame that carries values")

    def _failure(self) -> PeerError:
        assert self._error is not None
        return type(self._error)(str(self._error))

    def _broken_rule(self, what: str) -> PeerError:
        return RefusedError(f"{self.peer} {what}; the link is given up")

    async def _change(self) -> None:
        event = self._changed
        await event.wait()

    async def _change_within(self, seconds: float | None) -> bool:
        if seconds is None:
            await self._change()
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change()
                return True
        return False

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _size(frame: Frame) -> int:
    """About what a frame takes in memory, so that many that are nearly empty count as well."""
    values = len(frame.tensors) + len(frame.scalars) + len(frame.coded)
    held = sum(tensor.nbytes for tensor in frame.tensors.values())
    return _FRAME_BYTES + values * _VALUE_BYTES + held + sum(coded.data.nbytes for coded in frame.coded.values())


_FRAME_BYTES = 512
_VALUE_BYTES = 512
"""Of a frame's own objects, and of each of its values with its name."""
