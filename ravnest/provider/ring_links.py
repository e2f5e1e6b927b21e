"""The links to the other owners of a stage's rings: made when they are first needed, and kept while they last."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from ravnest.errors import PeerError, RefusedError
from ravnest.net.client import CoordinatorClient
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.stage_link import StageLink

WINDOW_BYTES = 16 << 20
"""What may be on its way to an owner. Less than between stages: what is left of an attempt that was given up still
arrives, and holds the next one up."""

Take = Callable[[str, Frame], Awaitable[None]]
"""What becomes of a frame, and who sent it; PeerError where it breaks the rules."""


class RingLinks:
    """One end of the link to each other owner. Nobody is dialled before `want`."""

    def __init__(
        self, peers: Iterable[Neighbour], generation: int, node: NodeIdentity, client: CoordinatorClient, take: Take
    ) -> None:
        self.ends = [StageLink(peer, False, node, client, patient=True, window_bytes=WINDOW_BYTES) for peer in peers]
        self._by_node = {end.node_id: end for end in self.ends}
        self._generation = generation
        self._take = take
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._reading: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begins to take what the other owners send."""
        self._reading = [asyncio.create_task(self._read(end)) for end in self.ends]

    def want(self, node_id: str) -> None:
        """The link to this owner is needed from now on. PeerError where there is none."""
        end = self._end(node_id)
        task = self._dialling.get(node_id)
        if task is None or task.done():
            self._dialling[node_id] = asyncio.create_task(_quietly(end.run()))

    async def rest(self) -> None:
        """Nothing is needed for now: connections that are there stay, others are not tried any more."""
        idle = [node for node in self._dialling if not self._by_node[node].link.connected]
        await _cancelled([self._dialling.pop(node) for node in idle])

    async def send(self, node_id: str, frame: Frame) -> None:
        """Sends a frame to an owner, waiting while it is slow; PeerError when the link has failed for good."""
        await self._end(node_id).link.send(frame)

    async def close(self, timeout_seconds: float) -> None:
        await asyncio.gather(*(end.close(timeout_seconds) for end in self.ends))
        await _cancelled([*self._dialling.values(), *self._reading])

    def _end(self, node_id: str) -> StageLink:
        end = self._by_node.get(node_id)
        if end is None:
            raise PeerError(f"{node_id} owns nothing of the rings of this stage")
        return end

    async def _read(self, end: StageLink) -> None:
        try:
            while (frame := await end.link.receive()) is not None:
                if frame.kind is not FrameKind.RING or frame.piece is None or frame.generation != self._generation:
                    raise PeerError(f"a {frame.kind.name} frame came where only pieces of this run's rings may")
                await self._take(end.node_id, frame)
        except PeerError as error:
            # Nothing more of it is taken; the coordinator hears of it when the attempt at hand fails.
            end.link.fail(RefusedError(f"{end.node_id} broke the protocol: {error}"))


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except PeerError:
        # Whoever sends over the link, or waits for what it brings, learns of it there.
        return


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
