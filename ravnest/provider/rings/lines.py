"""The lines to the other owners of a stage's rings: direct ones where they can be had, links where not.

Pieces say where they belong, so it does not matter over what they come. A direct line is fast and is lost when its
connection breaks; a link is slower, outlives its connections, and runs over the coordinator's relay where nobody can be
dialled. So a direct line is tried first, and after it broke the link is used for the rest of the round, and of the next
ones until it is time to try again.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final

import torch

from ravnest.background import BackgroundTasks, cancel_and_wait
from ravnest.errors import PeerError, RefusedError
from ravnest.net.direct_line import DirectLine, dial_direct
from ravnest.net.frames.frames import Frame, FrameKind, RingPlace
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import Deploy, Neighbour
from ravnest.provider.links.stage_link import StageLink
from ravnest.provider.rings.direct_line_retries import DirectLineRetries

WINDOW_BYTES: Final = 16 << 20
"""What may be on its way over a link. Less than between stages: what is left of an attempt that was given up still
arrives, and holds the next one up."""

DIAL_SECONDS: Final = 2.0

Take = Callable[[str, int, RingPlace, torch.Tensor], None]
"""What becomes of a piece, of whom, and of which generation; PeerError where it breaks the rules. Waits while it is
early."""


def ring_generation(order: Deploy) -> int:
    """Of the pieces of a stage's rings: the same for all owners, whenever their clusters were formed."""
    return order.ring_generation or order.generation


class RingLines:
    """The lines of one stage. `put` may be called from any thread, the rest belongs to the network's loop."""

    def __init__(
        self,
        peers: Iterable[Neighbour],
        generation: int,
        node: NodeIdentity,
        client: CoordinatorClient,
        take: Take,
        is_wanted: Callable[[RingPlace], bool],
        broke: Callable[[str, str], None],
    ) -> None:
        """`is_wanted` says whether a piece is still of use to anybody; `broke` is told on the loop which owner's line
        broke in the middle of something, and why."""
        loop = asyncio.get_running_loop()
        self.client = client
        """By which the coordinator relays what cannot go directly: whoever stays longer than that gets another."""
        self._make: Callable[[Neighbour], _Line] = lambda peer: _Line(
            peer, generation, node, self.client, take, is_wanted, broke, loop
        )
        self._broke = broke
        self._lines = {peer.node: self._make(peer) for peer in peers}
        self._is_open = False
        self._closing = BackgroundTasks()

    @property
    def ends(self) -> list[StageLink]:
        """Of the links that others may dial."""
        return [line.end for line in self._lines.values()]

    def open(self) -> None:
        """Begins to take what comes over links."""
        self._is_open = True
        for line in self._lines.values():
            line.open()

    def change(self, peers: Iterable[Neighbour]) -> None:
        """The other owners are these from now on. Those that were there before, under the same name of the link, are
        left alone with what is on their lines; what needed one that is gone has failed."""
        wanted = {peer.node: peer for peer in peers}
        links = {node_id: peer.link for node_id, peer in wanted.items()}
        gone = [node_id for node_id, line in self._lines.items() if links.get(node_id) != line.end.name]
        for node_id in gone:
            self._closing.spawn(self._lines.pop(node_id).close(0.0))
        for node_id, peer in wanted.items():
            if node_id not in self._lines:
                line = self._lines[node_id] = self._make(peer)
                if self._is_open:
                    line.open()
        for node_id in gone:
            self._broke(node_id, f"{node_id} is no owner of this ring any more")

    def want(self, node_id: str) -> None:
        """The line to or from this owner is needed from now on. PeerError where there is none."""
        self._line(node_id).want()

    def put(self, node_id: str, place: RingPlace, data: torch.Tensor) -> None:
        """Something for an owner, after all that was put before. What is for one that is gone is dropped."""
        line = self._lines.get(node_id)
        if line is not None:
            line.put(place, data)

    def is_direct(self, node_id: str) -> bool:
        """Whether what is put for this owner goes over a direct line."""
        line = self._lines.get(node_id)
        return line is not None and line.is_direct

    async def rest(self) -> None:
        """Nothing is needed for now: connections that are there stay, others are not tried any more."""
        for line in list(self._lines.values()):
            await line.rest()

    async def close(self, timeout_seconds: float) -> None:
        await asyncio.gather(*(line.close(timeout_seconds) for line in self._lines.values()), self._closing.wait())

    def _line(self, node_id: str) -> "_Line":
        line = self._lines.get(node_id)
        if line is None:
            raise PeerError(f"{node_id} owns nothing of the rings of this stage")
        return line


class _Line:
    """Everything to and from one other owner but direct lines that it dialled."""

    def __init__(
        self,
        peer: Neighbour,
        generation: int,
        node: NodeIdentity,
        client: CoordinatorClient,
        take: Take,
        is_wanted: Callable[[RingPlace], bool],
        broke: Callable[[str, str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:

        def make_end() -> StageLink:
            return StageLink(peer, False, node, client, patient=True, window_bytes=WINDOW_BYTES)

        self._make_end = make_end
        self.end = self._make_end()
        self._address = peer.direct_address
        self._generation = generation
        self._node = node
        self._take = take
        self._is_wanted = is_wanted
        self._broke = broke
        self._loop = loop
        self._queue: queue.SimpleQueue[tuple[RingPlace, torch.Tensor] | None] = queue.SimpleQueue()
        self._direct: DirectLine | None = None
        self._tries = DirectLineRetries()
        self._sending: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._linking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._arrivals = ThreadPoolExecutor(1, f"ravnest-ring-{peer.node}")

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def open(self) -> None:
        self._reading = asyncio.create_task(self._read())

    def want(self) -> None:
        if self.end.link.over and not self.end.link.connections and not self._closed:
            # It was refused before it carried anything: the other end had not heard of this owner yet.
            self.end = self._make_end()
            self.open()
        if self._linking is None or self._linking.done():
            self._linking = asyncio.create_task(_quietly(self.end.run()))

    def put(self, place: RingPlace, data: torch.Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="ravnest-ring-sender", daemon=True)
            self._thread.start()
        self._queue.put((place, data))

    async def rest(self) -> None:
        if self._linking is not None and not self.end.link.connected:
            await cancel_and_wait(self._linking)
            self._linking = None

    async def close(self, timeout_seconds: float) -> None:
        self._closed = True
        self._queue.put(None)
        for closing in (self._direct, self._sending):
            if isinstance(closing, DirectLine):
                closing.close()
            elif closing is not None:
                closing.cancel()
        await self.end.close(timeout_seconds)
        await cancel_and_wait(self._linking, self._reading)
        self._arrivals.shutdown(wait=False, cancel_futures=True)

    # On a thread of its own.

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None and not self._closed:
            place, data = item
            if not self._is_wanted(place):
                continue
            try:
                self._send(place, data)
            except (PeerError, CancelledError, RuntimeError) as error:
                if self._closed:
                    return
                self._loop.call_soon_threadsafe(self._broke, self.end.node_id, str(error))

    def _send(self, place: RingPlace, data: torch.Tensor) -> None:
        if self._direct is None and self._address and self._tries.is_due(place.round):
            try:
                self._direct = dial_direct(self._address, self.end.node_id, self._node, DIAL_SECONDS)
            except PeerError:
                self._tries.failed(place.round)
        if self._direct is not None:
            try:
                self._direct.send(self._generation, place, data)
            except PeerError:
                self._direct.close()
                self._direct = None
                self._tries.failed(place.round)
                raise
            self._tries.carried(place.round)
            return
        frame = Frame(FrameKind.RING, 0, generation=self._generation, tensors={"data": data}, piece=place)
        self._sending = asyncio.run_coroutine_threadsafe(self.end.link.send(frame), self._loop)
        self._sending.result()

    # On the loop.

    async def _read(self) -> None:
        """Takes what comes over the link; one that breaks the rules is not listened to any more."""
        link = self.end.link
        with contextlib.suppress(PeerError):
            while (frame := await link.receive()) is not None:
                try:
                    data = frame.tensors.get("data")
                    if frame.kind is not FrameKind.RING or frame.piece is None or data is None:
                        raise PeerError(f"a {frame.kind.name} frame came where only pieces of rings may")
                    arguments = (self.end.node_id, frame.generation, frame.piece, data)
                    await self._loop.run_in_executor(self._arrivals, self._take, *arguments)
                except PeerError as error:
                    link.fail(RefusedError(f"{self.end.node_id} broke the protocol: {error}"))
                    self._broke(self.end.node_id, str(error))


async def _quietly(work: Awaitable[None]) -> None:
    # Whoever sends over the link, or waits for what it brings, learns of its end there.
    with contextlib.suppress(PeerError):
        await work
