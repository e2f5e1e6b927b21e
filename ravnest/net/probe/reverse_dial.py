"""Whether a machine that has not joined yet can be dialled from outside.

It listens for a moment, and asks the coordinator to dial the host that its question comes from, and no other. Whoever
dials is sent a few random bytes: the coordinator compares them, so that it takes nobody else for that machine.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

NONCE_BYTES: Final = 16
DIAL_BACK_SECONDS: Final = 4.0


@asynccontextmanager
async def listening_for_a_moment(host: str, port: int) -> AsyncIterator[tuple[int, bytes]]:
    """The port that is listened on and what a caller is sent; OSError when the address cannot be had."""
    nonce = os.urandom(NONCE_BYTES)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        writer.close()

    server = await asyncio.start_server(answer, host, port)
    async with server:
        yield server.sockets[0].getsockname()[1], nonce


async def dial_back(host: str, port: int, nonce: bytes) -> str:
    """Empty when `nonce` is heard at that place; otherwise why not."""
    try:
        async with asyncio.timeout(DIAL_BACK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=NONCE_BYTES)
            try:
                heard = await reader.readexactly(NONCE_BYTES)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {DIAL_BACK_SECONDS:g} s"
    except asyncio.IncompleteReadError:
        return "something else answers there"
    except (OSError, ValueError, OverflowError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()
    return "" if heard == nonce else "something else answers there"
