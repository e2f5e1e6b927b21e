"""The links over which parts of replicas travel between providers, whether these hold stages or not.

They are links as between stages, but nothing depends on one: where it has failed it is made anew. The two ends hear of
it from the coordinator, each at its own time, so an end that is refused tries again for a while.
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
"""What may be on its way over such a link."""

CONNECT_SECONDS: Final = 30.0
"""How long the other end may take to come."""

_CLOSE_SECONDS: Final = 0.5


class PartLinks:
    """The links of one stay in the swarm. `allow` is told whenever other nodes may dial in for them."""

    def __init__(self, node: NodeIdentity, client: CoordinatorClient, allow: Callable[[frozenset[str]], None]) -> None:
        self._node = node
        self._client = client
        self._allow = allow
        self._links: list[PartLink] = []
        self._meeting = BackgroundTasks()

    def add(self, neighbour: Neighbour) -> "PartLink":
        """A link as the coordinator names it; from now on its other end may dial. To be closed."""
        link = PartLink(neighbour, self._node, self._client, self._remove)
        self._links.append(link)
        self._tell()
        return link

    def end(self, name: str, peer: str) -> "PartLink | None":
        """The link of this name to this node; the newest, where the coordinator has named it twice."""
        for link in reversed(self._links):
            if link.name == name and link.node_id == peer:
                return link
        return None

    def meet(self, name: str) -> bool:
        """The other end of this link waits at the relay: goes there too. Whether there is such a link."""
        found = [link for link in self._links if link.name == name]
        for link in found[-1:]:
            self._meeting.spawn(link.meet())
        return bool(found)

    async def close(self) -> None:
        """Ends all of them."""
        self._meeting.cancel()
        await asyncio.gather(*(link.close() for link in [*self._links]), self._meeting.close(), return_exceptions=True)

    def _remove(self, link: "PartLink") -> None:
        if link in self._links:
            self._links.remove(link)
            self._tell()

    def _tell(self) -> None:
        self._allow(frozenset(link.node_id for link in self._links))


class PartLink:
    """One of them, over as many failures as it takes."""

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
        """The link once it has a connection, made anew if it had failed; PeerError after so long, None: never."""
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
                        # It may not have heard of the link yet, or have made it anew as this end does now.
                        said = str(error)
                    await backoff.wait()
        except TimeoutError:
            raise PeerError(f"there is no link to {self.node_id} after {patience_seconds:g} s: {said}") from None

    async def accept(self, connection: Link) -> None:
        """The other end has dialled: uses its connection until that breaks."""
        if self._end.link.over:
            # It will be made anew by whoever waits for it, in a moment.
            raise PeerError(f"the link {self.name[:80]!r} is not ready here; try again")
        await self._end.accept(connection)

    async def meet(self) -> None:
        """The other end is at the relay."""
        with contextlib.suppress(RefusedError):
            await self._end.meet()

    async def close(self) -> None:
        """Ends it, in order if the other end is there to hear it."""
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
    # Whoever sends over the link, or waits for what it brings, learns of its end there.
    with contextlib.suppress(PeerError):
        await end.run()
