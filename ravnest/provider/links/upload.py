"""Uploads with retries when the connection breaks."""

from collections.abc import AsyncIterator, Callable

from ravnest.errors import PeerError, RefusedError
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.backoff import Backoff


async def upload(client: CoordinatorClient, name: str, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
    """Upload what `chunks()` yields, and retry from the beginning after every failure.

    RefusedError when the coordinator does not want the upload. There is no timeout: the session cancels the upload when
    the connection to the coordinator is gone for good.
    """
    backoff = Backoff()
    while True:
        try:
            return await client.upload(name, chunks())
        except RefusedError:
            raise
        except PeerError:
            await backoff.wait()
