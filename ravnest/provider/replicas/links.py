"""Links for parts of replicas between providers, with or without stages.

They work like links between stages, but a failed one is replaced, because nothing else depends on it. The coordinator
tells both ends about a link, each at another time, so an end that is refused retries for a while.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from ravnest.background import BackgroundTasks, cancel_and_wait
from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.backoff import Backoff
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.links.stage_link import StageLink

WINDOW_BYTES: Final = 8 << 20
"""Window of such a link."""

CONNECT_SECONDS: Final = 30.0
"""Timeout for the other end to connect."""

_CLOSE_SECONDS: Final = 0.5


class PartLinks:
    """The links of one session. `allow` is called with the nodes that may dial in for them, whenever these change."""

    def __init__(self, node: NodeIdentity, client: CoordinatorClient, allow: Callable[[frozenset[str]], None]) -> None:
        self._node = node
        self._client = client
        self._allow = allow
        self._links: list[PartLink] = []
        self._meeting = BackgroundTasks()

    def add(self, neighbour: Neighbour) -> "PartLink":
        """A link as the coordinator names it. Its other end may dial from now on. Close it after use."""
        link = PartLink(neighbour, self._node, self._client, self._remove)
        self._links.append(link)
        self._tell()
        return link

    def end(self, name: str, peer: str) -> "PartLink | None":
        """The link of this name to this node; the newest, if the coordinator has named it twice."""
        for link in reversed(self._links):
            if link.name == name and link.node_id == peer:
                return link
        return None

    def meet(self, name: str) -> bool:
        """The other end of this link waits at the relay: connect there too. Whether there is such a link."""
        found = [link for link in self._links if link.name == name]
        for link in found[-1:]:
            self._meeting.spawn(link.meet())
        return bool(found)

    async def close(self) -> None:
        """End all links."""
        self._meeting.cancel()
        await asyncio.gather(*(link.close() for link in [*self._links]), self._meeting.close(), return_exceptions=True)

    def _remove(self, link: "PartLink") -> None:
        if link in self._links:
            self._links.remove(link)
            self._tell()

    def _tell(self) -> None:
        self._allow(frozenset(link.node_id for link in self._links))


class PartLink:
    """One of these links, which replaces its StageLink after a failure."""

    def __init__(
        self,
        neighbour: Neighbour,
        node: NodeIdentity,
        client: CoordinatorClient,
        over: "Callable[[PartLink], None]",
    ) -> None:
        self.name = neighbour.link
        self.node_id = neighbour.node
        self._neighbour = neighbour
        self._node = node
        self._client = client
        self._over = over
        self._end = self._new_end()
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def connected(self, patience_seconds: float | None = CONNECT_SECONDS) -> ResumableLink:
        """The link once it has a connection, replaced if it had failed; PeerError after the timeout, None: no
        timeout."""
        backoff, said = Backoff(), f"{self.node_id} has not connected"
        try:
            async with asyncio.timeout(patience_seconds):
                while True:
                    if self._closed:
                        raise PeerError(f"the link to {self.node_id} was closed on this side")
                    if self._end.link.over:
                        await self._stop()
                        self._end = self._new_end()
                    if self._running is None:
                        self._running = asyncio.create_task(_quietly(self._end))
                    try:
                        await self._end.link.until_connected()
                        return self._end.link
                    except PeerError as error:
                        # The other end may not know the link yet, or may be replacing it as this end does.
                        said = str(error)
                    await backoff.wait()
        except TimeoutError:
            raise PeerError(f"there is no link to {self.node_id} after {patience_seconds:g} s: {said}") from None

    async def accept(self, connection: Link) -> None:
        """The other end has dialled: use its connection until it breaks."""
        if self._end.link.over:
            # The task that waits for the link replaces it in a moment.
            raise PeerError(f"the link {self.name[:80]!r} is not ready here; try again")
        await self._end.accept(connection)

    async def meet(self) -> None:
        """The other end waits at the relay."""
        with contextlib.suppress(RefusedError):
            await self._end.meet()

    async def close(self) -> None:
        """End the link, in order if the other end is connected."""
        self._closed = True
        self._over(self)
        await self._end.close(_CLOSE_SECONDS)
        await self._stop()

    def _new_end(self) -> StageLink:
        return StageLink(self._neighbour, False, self._node, self._client, window_bytes=WINDOW_BYTES)

    async def _stop(self) -> None:
        running, self._running = self._running, None
        await cancel_and_wait(running)


async def _quietly(end: StageLink) -> None:
    # The tasks that send or receive over the link get the error there.
    with contextlib.suppress(PeerError):
        await end.run()
