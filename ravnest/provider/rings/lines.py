"""Lines from a stage to the other owners of its rings: a direct line where possible, and a link as the fallback.

Every piece names its place, so pieces may arrive over either. A direct line is fast and is lost when its connection
breaks. A link is slower, survives its connections, and uses the coordinator's relay if neither end can be dialled. So a
direct line is tried first. After it broke, the link carries the rest of the round, and the following rounds until the
direct line is due for a retry.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from ravnest.background import BackgroundTasks, cancel_and_wait
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.frames import Frame, FrameKind, RingPlace
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import Deploy, Neighbour
from ravnest.provider.links.stage_link import StageLink
from ravnest.provider.rings.receiver import PieceReceiver
from ravnest.provider.rings.sender import PieceSender

WINDOW_BYTES: Final = 16 << 20
"""Maximum number of unconfirmed bytes on a link. Smaller than between stages, because the rest of an attempt that was
given up still arrives and delays the next attempt."""


def ring_generation(order: Deploy) -> int:
    """The generation in the pieces of a stage's rings: the same for all owners, even if their clusters were deployed at
    different times."""
    return order.ring_generation or order.generation


class RingLines:
    """The lines of one stage. `put` may be called on any thread, all other methods on the network's loop."""

    def __init__(
        self,
        peers: Iterable[Neighbour],
        generation: int,
        node: NodeIdentity,
        client: CoordinatorClient,
        receiver: PieceReceiver,
        budget: StateBudget | None = None,
    ) -> None:
        """Pieces take their turns in the `budget`; None: they do not wait."""
        self._budget = budget
        self.client = client
        """The connection to the coordinator, which relays links. Replaced after a reconnect, for new lines."""
        self._generation = generation
        self._node = node
        self._receiver = receiver
        self._lines = {peer.node: self._make_line(peer) for peer in peers}
        self._is_open = False
        self._closing = BackgroundTasks()

    @property
    def ends(self) -> list[StageLink]:
        """The ends of the links, which other owners may dial."""
        return [line.end for line in self._lines.values()]

    def open(self) -> None:
        """Begin to take pieces that come over links."""
        self._is_open = True
        for line in self._lines.values():
            line.open()

    def change(self, peers: Iterable[Neighbour]) -> None:
        """Replace the other owners. Lines to owners that stay, with the same link, keep running with all that they
        carry; the receiver is told that the lines to the others are broken."""
        wanted = {peer.node: peer for peer in peers}
        links = {node_id: peer.link for node_id, peer in wanted.items()}
        gone = [node_id for node_id, line in self._lines.items() if links.get(node_id) != line.end.name]
        for node_id in gone:
            self._closing.spawn(self._lines.pop(node_id).close(0.0))
        for node_id, peer in wanted.items():
            if node_id not in self._lines:
                line = self._lines[node_id] = self._make_line(peer)
                if self._is_open:
                    line.open()
        for node_id in gone:
            self._receiver.on_line_broken(node_id, f"{node_id} is no owner of this ring any more")

    def connect(self, node_id: str) -> None:
        """Keep the link to this owner connected from now on. PeerError if it owns nothing of the stage's rings."""
        line = self._lines.get(node_id)
        if line is None:
            raise PeerError(f"{node_id} owns nothing of the rings of this stage")
        line.connect()

    def put(self, node_id: str, place: RingPlace, data: torch.Tensor) -> None:
        """Queue a piece for an owner, in order. A piece for an owner that is gone is dropped."""
        line = self._lines.get(node_id)
        if line is not None:
            line.sender.put(place, data)

    def is_direct(self, node_id: str) -> bool:
        """Whether pieces for this owner go over a direct line."""
        line = self._lines.get(node_id)
        return line is not None and line.sender.is_direct

    async def stop_dialling(self) -> None:
        """Keep the links that are connected and stop connecting the others."""
        for line in list(self._lines.values()):
            await line.stop_dialling()

    async def close(self, timeout_seconds: float) -> None:
        await asyncio.gather(*(line.close(timeout_seconds) for line in self._lines.values()), self._closing.wait())

    def _make_line(self, peer: Neighbour) -> "_Line":
        return _Line(peer, self._generation, self._node, self.client, self._receiver, self._budget)


class _Line:
    """Everything between this stage and one other owner, except direct lines that the other owner dialled."""

    def __init__(
        self,
        peer: Neighbour,
        generation: int,
        node: NodeIdentity,
        client: CoordinatorClient,
        receiver: PieceReceiver,
        budget: StateBudget | None,
    ) -> None:
        self._peer = peer
        self._node = node
        self._client = client
        self._receiver = receiver
        self.end = self._make_end()
        self.sender = PieceSender(peer, generation, node, receiver, self._send_frame, budget)
        self._is_closed = False
        self._linking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._arrivals = ThreadPoolExecutor(1, f"ravnest-ring-{peer.node}")

    def open(self) -> None:
        self._reading = asyncio.create_task(self._read())

    def connect(self) -> None:
        if self.end.link.over and not self.end.link.connections and not self._is_closed:
            # The other end refused it before it carried anything, because it did not know this owner yet.
            self.end = self._make_end()
            self.open()
        if self._linking is None or self._linking.done():
            self._linking = asyncio.create_task(self._link())

    async def stop_dialling(self) -> None:
        if self._linking is not None and not self.end.link.connected:
            await cancel_and_wait(self._linking)
            self._linking = None

    async def close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        self.sender.close()
        await self.end.close(timeout_seconds)
        await cancel_and_wait(self._linking, self._reading)
        self._arrivals.shutdown(wait=False, cancel_futures=True)

    def _make_end(self) -> StageLink:
        return StageLink(self._peer, False, self._node, self._client, patient=True, window_bytes=WINDOW_BYTES)

    async def _send_frame(self, frame: Frame) -> None:
        await self.end.link.send(frame)

    async def _link(self) -> None:
        # Both the sender and the reader see the error that ends the link.
        with contextlib.suppress(PeerError):
            await self.end.run()

    async def _read(self) -> None:
        """Hand on the pieces that come over the link. A peer that breaks the protocol loses its link."""
        link, node_id = self.end.link, self._peer.node
        with contextlib.suppress(PeerError):
            while (frame := await link.receive()) is not None:
                try:
                    data = frame.tensors.get("data")
                    if frame.kind is not FrameKind.RING or frame.piece is None or data is None:
                        raise PeerError(f"a {frame.kind.name} frame came over a line that carries only pieces of rings")
                    loop, arguments = asyncio.get_running_loop(), (node_id, frame.generation, frame.piece, data)
                    await loop.run_in_executor(self._arrivals, self._receiver.take, *arguments)
                except PeerError as error:
                    link.fail(RefusedError(f"{node_id} broke the protocol: {error}"))
                    self._receiver.on_line_broken(node_id, str(error))
