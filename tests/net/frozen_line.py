"""A line between two ends on this machine over which, from one moment to another, nothing passes: a TCP proxy.

No connection closes and nothing is lost on the way: so it is when a machine is stopped, or for a while when a cable is
pulled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FrozenLine:
    """A line, and whether anything passes."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._to = port
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def freeze(self) -> None:
        self._passes.clear()

    def thaw(self) -> None:
        self._passes.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._carry(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            # That the other end has hung up does not pass either.
            await self._passes.wait()
            writer.close()


@asynccontextmanager
async def frozen_line(port: int) -> AsyncIterator[FrozenLine]:
    """A line to `port`, which begins well."""
    line = FrozenLine(port)
    server = await asyncio.start_server(line.connected, "127.0.0.1", 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()
        line.thaw()
        await line.close()
