"""Link to a neighbouring stage, and the connections that carry it.

One end dials: directly if that works, otherwise over the coordinator's relay. The other end waits until it is dialled,
or called to the relay. The newest connection carries the link.
"""

import asyncio
import contextlib
import math

from ravnest.codecs.codec import Codec, codec_named
from ravnest.codecs.float32 import Float32Codec
from ravnest.errors import PeerError, RefusedError
from ravnest.net.address import is_nearby, own_addresses, split_address
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.rpc.client import CoordinatorClient, dial_link
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import DIALLING_AWAIT, DIALLING_RELAY, LinkState, Neighbour
from ravnest.settings import ACTIVATION_CODECS

PATIENCE_SECONDS = 60.0
"""Timeout of a neighbour without a connection. It is longer than the coordinator's own timeouts, because the
coordinator knows more and decides."""

DIRECT_SECONDS = 4.0
TRY_SECONDS = 1.5
"""Timeouts of dialling: a neighbour that is expected to be reachable, and one that probably is not."""

RETURN_SECONDS = 60.0
"""Interval at which a relayed link tries to become direct again."""


class StageLink:
    """One end of a link between two stages. `link` carries its frames while `run` runs."""

    def __init__(
        self,
        neighbour: Neighbour,
        is_next: bool,
        node: NodeIdentity,
        client: CoordinatorClient,
        *,
        patient: bool = False,
        window_bytes: int | None = None,
    ) -> None:
        """A `patient` link waits for its neighbour without a timeout. PeerError when the order names a codec that is
        not for activations."""
        self.name = neighbour.link
        self.node_id = neighbour.node
        self.link = ResumableLink(neighbour.node, window_bytes)
        self._patience_seconds = math.inf if patient else PATIENCE_SECONDS
        self._neighbour = neighbour
        self.is_next = is_next
        self.codec = _codec(neighbour)
        """The codec of activations and gradients, both ways."""
        self.saved_bytes = 0
        """Bytes that the codec saved so far."""
        self._node = node
        self._client = client
        self._budget: StateBudget | None = None
        self._route = ""
        self._tried = False

    def paces(self, budget: StateBudget) -> None:
        """Count what this link carries as the foreground of this budget."""
        self._budget = self.link.foreground = budget

    async def run(self) -> None:
        """Keep the link connected until it is over; PeerError when the neighbour is gone."""
        patience = asyncio.create_task(self.link.fail_when_gone(self._patience_seconds))
        returning = asyncio.create_task(self._return_to_direct())
        try:
            if self._neighbour.dialling == DIALLING_AWAIT:
                await patience
            else:
                await self.link.keep_dialling(self._dial)
            if self.link.error is not None:
                raise self.link.error
        finally:
            patience.cancel()
            returning.cancel()

    async def accept(self, connection: Link) -> None:
        """The neighbour has dialled: carry the link over its connection until that breaks."""
        self._takes("direct", connection.peer_host)
        await self.link.carry(connection)

    async def meet(self) -> None:
        """The neighbour is at the relay: connect there too. After a failure the neighbour retries."""
        with contextlib.suppress(PeerError):
            connection = await self._client.relay(self.name)
            self._takes("relayed")
            await self.link.carry(connection)

    def state(self) -> LinkState:
        """State of the link, for the report."""
        return LinkState(
            node=self.node_id,
            route=self._route if self.link.connected else "",
            connections=self.link.connections,
            bytes_sent=self.link.bytes_sent,
            bytes_received=self.link.bytes_received,
            next=self.is_next,
            raw_bytes_sent=self.link.bytes_sent + self.saved_bytes,
            unconfirmed=self.link.unconfirmed,
            unconfirmed_bytes=self.link.unconfirmed_bytes,
        )

    async def close(self, timeout_seconds: float) -> None:
        """End the link, in order if the neighbour is connected."""
        if self.link.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self.link.close()
        self.link.fail(PeerError(f"the link to {self.node_id} was closed on this side"))

    def abort(self) -> None:
        """End the link at once; the neighbour notices that the connection is gone."""
        self.link.fail(PeerError(f"the link to {self.node_id} was given up on this side"))

    def _takes(self, route: str, host: str = "") -> None:
        """The next connection takes this route, directly to this host."""
        self._route = route
        if self._budget is not None:
            nearby = bool(host) and is_nearby(host, own_addresses(host))[0]
            self.link.foreground = self._budget.nearby if nearby else self._budget

    async def _dial(self) -> Link:
        unlikely = self._neighbour.dialling == DIALLING_RELAY
        if self._neighbour.address and not (unlikely and self._tried):
            # It may be on the same network, even if other machines cannot dial it.
            self._tried = True
            with contextlib.suppress(PeerError):
                connection = await self._dial_directly(TRY_SECONDS if unlikely else DIRECT_SECONDS)
                self._takes("direct", split_address(self._neighbour.address)[0])
                return connection
        connection = await self._client.relay(self.name)
        self._takes("relayed")
        return connection

    async def _dial_directly(self, timeout_seconds: float) -> Link:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await dial_link(self._neighbour.address, self.node_id, self._node, self.name)
        except TimeoutError:
            raise PeerError(f"{self.node_id} does not answer at {self._neighbour.address}") from None

    async def _return_to_direct(self) -> None:
        """Try now and then to make a relayed link direct again, for example after a network failure."""
        if self._neighbour.dialling == DIALLING_AWAIT or not self._neighbour.address:
            return
        while not self.link.over:
            await asyncio.sleep(RETURN_SECONDS)
            if self._route == "relayed" and self.link.connected:
                with contextlib.suppress(PeerError):
                    connection = await self._dial_directly(TRY_SECONDS)
                    self._takes("direct", split_address(self._neighbour.address)[0])
                    await self.link.carry(connection)


def _codec(neighbour: Neighbour) -> Codec:
    name = neighbour.codec or Float32Codec.name
    if name not in ACTIVATION_CODECS:
        raise PeerError(
            f"the link to {neighbour.node} is to carry activations in {name[:80]!r}; this version knows "
            f"{', '.join(ACTIVATION_CODECS)}"
        )
    return codec_named(name)


def link_of(links: list[StageLink], name: str, peer: str) -> StageLink:
    """The link of this name to this node; RefusedError when there is none."""
    for link in links:
        if link.name == name and link.node_id == peer:
            return link
    raise RefusedError(f"there is no link {name[:80]!r} with {peer} here")
