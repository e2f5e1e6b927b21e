"""Test of whether a machine that has not joined yet can be dialled from outside.

The machine listens for a moment, and asks the coordinator to dial the host that this question comes from, and no other.
It sends a few random bytes to every caller. The coordinator compares them, so that it does not mistake another machine
for this one.
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
    """The port and the bytes that a caller gets. OSError when the address cannot be used."""
    nonce = os.urandom(NONCE_BYTES)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        writer.close()

    server = await asyncio.start_server(answer, host, port)
    async with server:
        yield server.sockets[0].getsockname()[1], nonce


async def dial_back(host: str, port: int, nonce: bytes) -> str:
    """Empty when that address sends the `nonce`; otherwise the reason as text."""
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
