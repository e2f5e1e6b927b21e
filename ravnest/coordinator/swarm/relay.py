"""Relay for links between two providers of which neither can dial the other.

Both dial the coordinator, which copies their messages without reading them. An end is admitted only to a link that a
current order gives it. The coordinator made the order, so it knows which links carry state: their messages wait for
their turn on its line, and a sender waits while they do. Messages of other links are foreground.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ravnest.errors import PeerError, RefusedError
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.state_rate import StateKind
from ravnest.net.streams.frame_stream import RelayEnd
from ravnest.net.streams.stream import ByteStream

MEET_SECONDS = 20.0
"""Timeout for the other end to connect; then the end tries again, perhaps by another route."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    node_id: str
    met: "asyncio.Future[RelayEnd]"


class Relay:
    """Links of the current deployment, and the ends that are connected."""

    def __init__(self, call: Callable[[str, str], Awaitable[None]], budget: StateBudget | None = None) -> None:
        """`call(node_id, link)` asks a node to connect for this link. Without a `budget` nothing waits."""
        self._call = call
        self._budget = budget or StateBudget.unlimited()
        self._links: Mapping[str, frozenset[str]] = {}
        self._state: Mapping[str, StateKind] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._passing: dict[str, tuple[ByteStream, ByteStream]] = {}

    def allow(self, links: Mapping[str, frozenset[str]], state: Mapping[str, StateKind] | None = None) -> None:
        """Replaces the links that may be relayed, each with its two nodes; others are ended. `state`: the links that
        carry state, with its kind."""
        self._links, self._state = links, state or {}
        for link, streams in self._passing.items():
            if link not in links:
                for stream in streams:
                    stream.fail(RefusedError(f"the deployment of the link {link!r} is over"))

    async def serve(self, node_id: str, end: RelayEnd) -> None:
        """Copies messages between this end and the other, until either ends."""
        nodes = self._links.get(end.label, frozenset())
        if node_id not in nodes:
            raise RefusedError(f"{node_id} is no end of the link {end.label[:80]!r}, so it is not relayed")
        waiting = self._waiting.pop(end.label, None)
        if waiting is not None and not waiting.met.done():
            if waiting.node_id != node_id:
                waiting.met.set_result(end)
                # The call of the first end copies in both directions.
                await end.stream.finished()
                return
            # The end has connected again, so its earlier connection is dead.
            waiting.met.set_exception(PeerError(f"{node_id} has connected again"))
        [other_id] = nodes - {node_id}
        pair = end.stream, (await self._meet(end.label, node_id, other_id)).stream
        self._passing[end.label] = pair
        try:
            await self._pass_on(end.label, *pair)
        finally:
            if self._passing.get(end.label) is pair:
                del self._passing[end.label]

    async def _meet(self, link: str, node_id: str, other_id: str) -> RelayEnd:
        """The other end, once it has connected; PeerError on timeout."""
        place = self._waiting[link] = _Waiting(node_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(MEET_SECONDS):
                await self._call(other_id, link)
                return await place.met
        except TimeoutError:
            raise PeerError(f"{other_id} did not connect to the relay within {MEET_SECONDS:.0f} s") from None
        finally:
            if self._waiting.get(link) is place:
                del self._waiting[link]

    async def _pass_on(self, link: str, one: ByteStream, other: ByteStream) -> None:
        """Copies both ways until one side ends or breaks, and ends both."""
        kind = self._state.get(link)
        copies = [asyncio.create_task(self._copy(kind, *way)) for way in ((one, other), (other, one))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            # Messages sent before an orderly end still arrive.
            if any(copy.done() and not copy.cancelled() and copy.exception() is None for copy in copies):
                await asyncio.gather(one.close(), other.close())
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for stream in (one, other):
                stream.fail(PeerError("the other end of the relayed link has gone"))

    async def _copy(self, kind: StateKind | None, source: ByteStream, target: ByteStream) -> None:
        transfer = None if kind is None else self._budget.transfer(kind)
        while (message := await source.receive()) is not None:
            if transfer is not None:
                await transfer.turn(len(message))
                await target.send(message)
                continue
            self._budget.queued(len(message))
            written = False
            try:
                await target.send(message)
                written = True
            finally:
                (self._budget.written if written else self._budget.dropped)(len(message))
