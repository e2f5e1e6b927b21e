"""Resumable link: frames arrive once and in order, over as many connections as it takes.

Each end counts the frames that arrived, and keeps the bytes of the frames it sent until the other end has confirmed
them. On every new connection both ends first tell their counts, and each end sends again what the other one lacks. A
sender waits while its window is full, so a link without a connection slows its stage down instead of filling its
memory.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.pacing.foreground import Foreground
from ravnest.net.streams.backoff import LAST_BACKOFF_SECONDS, Backoff, BackoffLimits
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.link_carrier import LinkCarrier, OnWritten
from ravnest.net.streams.link_state import LinkState

WINDOW_BYTES: Final = 64 << 20
"""A sender waits while this many bytes are unconfirmed; one frame may exceed it."""


class ResumableLink:
    """One end of a link. It carries frames while some connection is given to `carry`, and keeps them meanwhile.

    - `send` waits while the window is full, and raises PeerError once the link is closed or has failed for good.
    - `receive` returns each frame once, None after the other end's `close`, and raises PeerError on failure for good.
    - A peer that breaks the rules of the protocol fails the link for good.
    """

    def __init__(self, peer: str, window_bytes: int | None = None, backoff_limits: BackoffLimits | None = None) -> None:
        """`window_bytes` limits the unconfirmed frames, and the received ones that were not taken; None: WINDOW_BYTES.
        `backoff_limits` are for `keep_dialling`."""
        self.peer = peer
        self.on_written: OnWritten | None = None
        """Called when a connection has written frames. Set it before there is a connection."""
        self.foreground: Foreground | None = None
        """Counts the frames of this link as traffic that others wait for. Set it before there is a connection."""
        self._state = LinkState(peer, WINDOW_BYTES if window_bytes is None else window_bytes)
        self._backoff_limits = backoff_limits
        self._carrier: LinkCarrier | None = None
        self._past_bytes_sent = 0
        self._past_bytes_received = 0

    @property
    def unconfirmed(self) -> int:
        """Frames that were given to `send` and that the other end has not confirmed."""
        return len(self._state.sent)

    @property
    def unconfirmed_bytes(self) -> int:
        """Size of these frames."""
        return self._state.sent.size_bytes

    @property
    def frames_sent(self) -> int:
        """Frames that were given to `send` so far."""
        return self._state.sent.total

    @property
    def bytes_sent(self) -> int:
        return self._past_bytes_sent + (self._carrier.connection.bytes_sent if self._carrier else 0)

    @property
    def bytes_received(self) -> int:
        return self._past_bytes_received + (self._carrier.connection.bytes_received if self._carrier else 0)

    @property
    def connections(self) -> int:
        """Connections that have carried this link so far."""
        return self._state.connections

    @property
    def connected(self) -> bool:
        """Whether a connection carries the link, over which the other end has told its count."""
        return self._carrier is not None and self._carrier.has_resumed

    @property
    def last_received_at(self) -> float:
        """The time of the last frame from the other end; initially, the time when the link was made."""
        return self._state.last_received_at

    @property
    def broken_at(self) -> float | None:
        """The time since which no connection carries the link, by the same clock; None while one does."""
        return self._state.broken_at

    @property
    def beat_seconds(self) -> float | None:
        """Longest silence of this end. With nothing to send it then confirms again, to show that it is there. None:
        it may be silent for any time."""
        return self._state.beat_seconds

    @beat_seconds.setter
    def beat_seconds(self, seconds: float | None) -> None:
        self._state.beat_seconds = seconds
        self._state.notify()

    @property
    def error(self) -> PeerError | None:
        """Why the link has failed for good, if it has."""
        return self._state.error

    @property
    def over(self) -> bool:
        """Whether the link has ended or failed: it will carry nothing more."""
        return self._state.is_over

    async def until_connected(self) -> None:
        """Wait until a connection carries the link. PeerError when the link has failed for good."""
        while not self.connected:
            if self._state.error is not None:
                raise self._state.failure()
            await self._state.change()

    async def until_disconnected(self) -> None:
        """Wait until no connection carries the link."""
        while self._carrier is not None:
            await self._state.change()

    async def fail_when_gone(self, patience_seconds: float) -> None:
        """Fail the link once it has been without a connection for this time. Returns when the link is over."""
        while not self.over:
            if not self.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_seconds if math.isfinite(patience_seconds) else None):
                        while not self.connected and not self.over:
                            await self._state.change()
                    continue
                self.fail(PeerError(f"there has been no connection to {self.peer} for {patience_seconds:.0f} s"))
            else:
                await self._state.change()

    async def send(self, frame: Frame) -> None:
        """Send a frame, waiting while the window is full. Its tensors have been read when this returns."""
        await self._until_room()
        self._add(encode(frame))

    async def send_encoded(self, data: bytes) -> None:
        """The same for a frame that was encoded already, off the network's loop."""
        await self._until_room()
        self._add(data)

    async def receive(self) -> Frame | None:
        """The next frame, each once and in order; None after the other end's orderly end."""
        state = self._state
        while not state.received:
            if state.has_ended:
                return None
            if state.error is not None:
                raise state.failure()
            await state.change()
        frame = state.received.take()
        state.notify()
        return frame

    async def close(self) -> None:
        """Announce that nothing more comes. Returns when the other end knows, has ended too, or the link has failed."""
        if not self._state.is_closing and not self.over:
            self._add(encode(Frame(FrameKind.END, 0)))
        self._state.is_closing = True
        while not self.over:
            await self._state.change()

    def fail(self, error: PeerError) -> None:
        """End the link for good. The other end hears the reason if it broke the rules and is connected."""
        if self._state.error is None and not self._state.has_ended:
            self._state.error = error
        if self._carrier is not None:
            self._carrier.connection.abort(error if isinstance(error, RefusedError) else None)
        self._state.notify()

    async def carry(self, connection: Link) -> None:
        """Run the link over this connection until it breaks, which raises PeerError, or the link is over.

        A newer connection replaces an older one, which may be dead without knowing it. A peer that breaks the rules
        fails the link for good.
        """
        if self._state.error is not None:
            raise self._state.failure()
        while self._carrier is not None:
            # Checked again after each wait: several connections may come at once, and only the last one is to stay.
            self._carrier.connection.abort()
            await self._state.change()
        carrier = self._carrier = LinkCarrier(self._state, connection, self.on_written, self.foreground)
        try:
            await carrier.run()
        except PeerError as error:
            if isinstance(error, RefusedError):
                self.fail(error)
            connection.abort(error)
            raise
        finally:
            self._past_bytes_sent += connection.bytes_sent
            self._past_bytes_received += connection.bytes_received
            if carrier.has_resumed:
                self._state.broken_at = time.monotonic()
            self._carrier = None
            carrier.end()
            self._state.notify()

    async def keep_dialling(self, dial: Callable[[], Awaitable[Link]]) -> None:
        """Carry the link over one connection after another, with a backoff between failures, until it is over.

        Returns when the link is closed or has ended; raises PeerError when it has failed for good.
        """
        backoff = Backoff(self._backoff_limits)
        while not self.over:
            # There may be a connection already: the other end has dialled, or a better route was found.
            await self.until_disconnected()
            began = time.monotonic()
            try:
                await self.carry(await dial())
            except PeerError as error:
                if isinstance(error, RefusedError):
                    self.fail(error)
                if self._state.error is not None:
                    raise self._state.failure() from None
                if self.over:
                    return
                # The backoff goes on for a peer that accepts connections and breaks them at once.
                if time.monotonic() - began > LAST_BACKOFF_SECONDS:
                    backoff.reset()
                await backoff.wait()

    async def _until_room(self) -> None:
        state = self._state
        while state.sent.is_full and not state.is_closing and not state.is_over:
            await state.change()
        if state.error is not None:
            raise state.failure()
        if state.has_ended:
            raise PeerError(f"{self.peer} has ended the link")
        if state.is_closing:
            raise PeerError(f"the link to {self.peer} is closed on this side")

    def _add(self, data: bytes) -> None:
        self._state.sent.add(data)
        self._state.notify()
