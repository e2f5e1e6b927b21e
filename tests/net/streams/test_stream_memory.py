"""A stream that waits for the next message does not keep the one before alive."""

import asyncio
import sys

from ravnest.errors import PeerError
from ravnest.net.streams.stream import ByteStream
from tests.net.swarm_ends import run


class _Wire:
    """A connection whose messages the test hands over, and takes."""

    peer = "other"
    label = ""
    dialled = True
    host = ""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[bytes] = asyncio.Queue()
        self.written = asyncio.Event()

    async def read(self) -> bytes | None:
        return await self.arriving.get()

    async def write(self, message: bytes) -> None:
        self.written.set()

    async def end(self, refusal: PeerError | None) -> None:
        """Nothing to tell."""

    async def release(self) -> None:
        """Nothing to release."""


def test_a_stream_keeps_no_message_that_was_received() -> None:
    async def test() -> None:
        wire = _Wire()
        stream = ByteStream(wire, batch=True)
        message = bytes(1000)
        alone = sys.getrefcount(message)
        wire.arriving.put_nowait(message)
        assert await stream.receive() is message
        await asyncio.sleep(0)
        assert sys.getrefcount(message) == alone
        stream.fail(PeerError("the test is over"))
        await stream.finished()

    run(test())


def test_a_stream_keeps_no_message_that_was_written() -> None:
    async def test() -> None:
        wire = _Wire()
        stream = ByteStream(wire, batch=True)
        message = bytes(1000)
        alone = sys.getrefcount(message)
        await stream.send(message)
        await wire.written.wait()
        await asyncio.sleep(0)
        assert sys.getrefcount(message) == alone
        stream.fail(PeerError("the test is over"))
        await stream.finished()

    run(test())
