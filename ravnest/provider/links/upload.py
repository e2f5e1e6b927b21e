"""Uploads of state: paced, and with retries when the connection breaks."""

from collections.abc import AsyncIterator, Callable

from ravnest.errors import PeerError, RefusedError
from ravnest.net.pacing.budget import PacedTransfer
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.backoff import Backoff


async def upload(
    client: CoordinatorClient,
    name: str,
    chunks: Callable[[], AsyncIterator[bytes]],
    transfer: PacedTransfer | None = None,
) -> None:
    """Upload what `chunks()` yields when it is the turn of this transfer (None: at once), and retry from the beginning
    after every failure.

    RefusedError when the coordinator does not want the upload. There is no timeout: the session cancels the upload when
    the connection to the coordinator is gone for good.
    """
    backoff = Backoff()
    while True:
        try:
            return await client.upload(name, chunks() if transfer is None else paced(chunks(), transfer))
        except RefusedError:
            raise
        except PeerError:
            await backoff.wait()


async def paced(chunks: AsyncIterator[bytes], transfer: PacedTransfer) -> AsyncIterator[bytes]:
    """The same bytes in pieces, each when its turn has come."""
    async for chunk in chunks:
        async for piece in transfer.pieces(chunk):
            yield piece
