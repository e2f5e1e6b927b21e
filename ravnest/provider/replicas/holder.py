"""Holder's side of replicas: stores the parts of other nodes' stages, and fetches ahead what a takeover would need."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Final

from ravnest.background import BackgroundTasks, cancel_and_wait, in_thread
from ravnest.errors import PeerError, RavnestError, error_text
from ravnest.graph.state_size import max_state_bytes
from ravnest.net.streams.backoff import FIRST_BACKOFF_SECONDS
from ravnest.net.v1.control_pb2 import ArtifactRef, Hold
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.graph_text import GraphText
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.replicas.coded_parts import ArrivingPart
from ravnest.provider.replicas.files import PartFiles, check_key
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.transfer import MAX_BYTES, PartArrivals, PartRefusedError

_MAX_HELD: Final = 1000


class ReplicaHolder:
    """Holds parts for as many owners as the coordinator asks."""

    def __init__(self, files: PartFiles, links: PartLinks, artifacts: Artifacts, say: Callable[[str], None]) -> None:
        """With a cache, the constant weights of a stage are fetched ahead; `say` prints lines for the user."""
        self._files = files
        self._links = links
        self._artifacts = artifacts
        self._say = say
        self._held: dict[str, tuple[PartLink, asyncio.Task[None]]] = {}
        self._ending = BackgroundTasks()

    def hold(self, order: Hold) -> None:
        """Accept parts of this stage from this owner from now on, and from no earlier one."""
        key = check_key(order.key)
        if key not in self._held and len(self._held) >= _MAX_HELD:
            raise PeerError(f"the coordinator wants parts of more than {_MAX_HELD} stages held")
        self._end(key)
        if order.owner.node:
            link = self._links.add(order.owner)
            self._held[key] = link, asyncio.create_task(self._serve(order, link))

    def forget(self, keep: Collection[str]) -> None:
        """Accept parts of no other stages than these."""
        for key in [*self._held]:
            if key not in keep:
                self._end(key)

    async def close(self) -> None:
        """End all links. The files stay."""
        for key in [*self._held]:
            self._end(key)
        await self._ending.wait()

    def _end(self, key: str) -> None:
        if key in self._held:
            link, serving = self._held.pop(key)
            serving.cancel()
            self._ending.spawn(_closed(link, serving))

    async def _serve(self, order: Hold, link: PartLink) -> None:
        most, warming = await self._fetch_graph(order), asyncio.create_task(self._warm(order.weights))
        try:
            while True:
                try:
                    await self._take_all(order, link, most)
                except PeerError:
                    pass  # The owner gets the error too, and reports it.
                except Exception as error:
                    self._say(f"cannot take a part of {order.key}: {error_text(error)}")
                await asyncio.sleep(FIRST_BACKOFF_SECONDS)
        finally:
            await cancel_and_wait(warming)

    async def _take_all(self, order: Hold, link: PartLink, max_bytes: int) -> None:
        """Receive parts until the link fails."""

        def begin(replica: int, size_bytes: int) -> ArrivingPart:
            return ArrivingPart(self._files, order.key, replica, size_bytes, max_bytes)

        arrivals = PartArrivals(await link.connected(None), begin)
        while True:
            with contextlib.suppress(PartRefusedError):
                await arrivals.next()

    async def _fetch_graph(self, order: Hold) -> int:
        """The maximum size of a part, from the stage's graph."""
        if not order.graph.id:
            return MAX_BYTES
        try:
            size = order.graph.size_bytes
            text = await self._artifacts.get(order.graph, lambda: GraphText(size), FetchProgress(size))
            return await in_thread(lambda: max_state_bytes(text.graph()))
        except RavnestError as error:
            self._say(f"cannot fetch a stage ahead for which this machine is a standby: {error}")
            return MAX_BYTES

    async def _warm(self, weights: ArtifactRef) -> None:
        if weights.id and self._artifacts.cached:
            try:
                await self._artifacts.get(weights, _DiscardingSink, FetchProgress(weights.size_bytes))
            except RavnestError as error:
                self._say(f"cannot fetch a stage ahead for which this machine is a standby: {error}")


async def _closed(link: PartLink, serving: asyncio.Task[None]) -> None:
    await asyncio.gather(serving, return_exceptions=True)
    await link.close()


class _DiscardingSink:
    """Discards the bytes: only the cache keeps them."""

    def feed(self, chunk: bytes) -> None:
        pass
