"""Slow line: a TCP proxy on this machine with a limited bandwidth and a latency."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 4096
_LATE_SECONDS = 0.01
"""So late a busy machine may wake the line without making it slower."""


@asynccontextmanager
async def slow_line(
    port: int, up_bytes_per_second: float, down_bytes_per_second: float, delay_seconds: float
) -> AsyncIterator[int]:
    """The port of a line to `port`; `delay_seconds` is one way."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        for source, target, rate in (
            (reader, there_writer, up_bytes_per_second),
            (there_reader, writer, down_bytes_per_second),
        ):
            task = asyncio.create_task(_carry(source, target, rate, delay_seconds))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: float, delay_seconds: float) -> None:
    """Each piece leaves when the one before has, and arrives `delay_seconds` later."""
    on_the_way: deque[asyncio.Task[None]] = deque()
    free_at = time.monotonic()

    async def deliver(data: bytes, at: float, before: "asyncio.Task[None] | None") -> None:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        if before is not None:
            await before
        writer.write(data)

    before: asyncio.Task[None] | None = None
    try:
        while data := await reader.read(_PIECE_BYTES):
            free_at = max(free_at, time.monotonic() - _LATE_SECONDS) + len(data) / rate
            before = asyncio.create_task(deliver(data, max(free_at, time.monotonic()) + delay_seconds, before))
            on_the_way.append(before)
            while on_the_way and on_the_way[0].done():
                on_the_way.popleft()
            # A line holds no more than is on the way.
            await asyncio.sleep(max(0.0, free_at - time.monotonic()))
    except ConnectionError:
        pass
    finally:
        for task in on_the_way:
            task.cancel()
        writer.close()
