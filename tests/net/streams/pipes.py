"""Streams in memory: two ends that pass frames to each other without a socket."""

import asyncio
from collections.abc import Callable

from ravnest.errors import PeerError
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.frames import Frame


class Pipe:
    """One end of a connection in memory that breaks, both ways, after a number of frames."""

    def __init__(self, breaks_after: int) -> None:
        self.inbox: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.other: Pipe | None = None
        self.bytes_sent = self.bytes_received = 0
        self.left = [breaks_after]
        self.broken = asyncio.Event()
        self.written: Callable[[int], None] = lambda sent_bytes: None

    @classmethod
    def pair(cls, breaks_after: int) -> "tuple[Pipe, Pipe]":
        a, b = cls(breaks_after), cls(breaks_after)
        a.other, b.other = b, a
        b.left = a.left
        b.broken = a.broken
        return a, b

    async def send_encoded(self, data: bytes) -> None:
        if self.broken.is_set():
            raise PeerError("broken")
        self.left[0] -= 1
        if self.left[0] <= 0:
            self.broken.set()
            raise PeerError("broken")
        assert self.other is not None
        self.other.inbox.put_nowait(decode(data))
        self.bytes_sent += len(data)
        self.written(self.bytes_sent)
        await asyncio.sleep(0)

    def watch_writing(self, written: Callable[[int], None]) -> None:
        self.written = written

    async def receive(self) -> Frame | None:
        got = asyncio.create_task(self.inbox.get())
        broken = asyncio.create_task(self.broken.wait())
        try:
            await asyncio.wait({got, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not got.done():
                raise PeerError("broken")
            return got.result()
        finally:
            got.cancel()
            broken.cancel()

    async def close(self) -> None:
        """Nothing to do: the frames that were sent are in the other end's inbox."""

    def abort(self, why: PeerError | None = None) -> None:
        self.broken.set()
