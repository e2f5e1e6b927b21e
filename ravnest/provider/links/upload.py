"""Uploads that begin again when the connection breaks."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from ravnest.errors import PeerError, RefusedError
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.resumable_link import FIRST_BACKOFF_SECONDS, longer_pause


async def upload(client: CoordinatorClient, name: str, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
    """Uploads what `chunks()` yields, as often as it takes.

    RefusedError when the coordinator does not want it. Whoever holds the connection to the coordinator gives up when
    that is gone for good, and cancels this.
    """
    pause, since = FIRST_BACKOFF_SECONDS, time.monotonic()
    while True:
        try:
            return await client.upload(name, chunks())
        except RefusedError:
            raise
        except PeerError:
            await asyncio.sleep(pause)
            pause = longer_pause(pause, time.monotonic() - since)
