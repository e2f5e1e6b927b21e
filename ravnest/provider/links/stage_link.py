"""The link to a neighbouring stage, and how its connections come about.

One end dials, directly where that works and over the coordinator's relay where it does not. The other end waits to be
dialled, or to be called to the relay. Whichever connection comes last carries the link.
"""

import asyncio
import contextlib
import math

from ravnest.codecs.codec import Codec, codec_named
from ravnest.codecs.float32 import Float32Codec
from ravnest.errors import PeerError, RefusedError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import CoordinatorClient, dial_link
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import DIALLING_AWAIT, DIALLING_RELAY, LinkState, Neighbour
from ravnest.settings import ACTIVATION_CODECS

PATIENCE_SECONDS = 60.0
"""How long a neighbour may be away. Longer than the coordinator's own patience: it knows more, and decides."""

DIRECT_SECONDS = 4.0
TRY_SECONDS = 1.5
"""How long a neighbour is dialled that can be reached, as far as anybody knows, and one that probably cannot."""

RETURN_SECONDS = 60.0
"""How often a link that is relayed tries to run directly again."""


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
        """A `patient` one waits without end for a neighbour that is away. PeerError where the order names a codec that
        is not one for activations."""
        self.name = neighbour.link
        self.node_id = neighbour.node
        self.link = ResumableLink(neighbour.node, window_bytes)
        self._patience_seconds = math.inf if patient else PATIENCE_SECONDS
        self._neighbour = neighbour
        self.is_next = is_next
        self.codec = _codec(neighbour)
        """Of activations and gradients, both ways."""
        self.saved_bytes = 0
        """So many more would have been sent without it."""
        self._node = node
        self._client = client
        self._route = ""
        self._tried = False

    async def run(self) -> None:
        """Sees to the link's connections until it is over; PeerError when the neighbour is gone."""
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
        """The neighbour has dialled: carries the link over its connection, until that breaks."""
        self._route = "direct"
        await self.link.carry(connection)

    async def meet(self) -> None:
        """The neighbour is at the relay: goes there too. Where that fails the neighbour tries again."""
        with contextlib.suppress(PeerError):
            connection = await self._client.relay(self.name)
            self._route = "relayed"
            await self.link.carry(connection)

    def state(self) -> LinkState:
        """How the link runs."""
        return LinkState(
            node=self.node_id,
            route=self._route if self.link.connected else "",
            connections=self.link.connections,
            bytes_sent=self.link.bytes_sent,
            bytes_received=self.link.bytes_received,
            next=self.is_next,
            raw_bytes_sent=self.link.bytes_sent + self.saved_bytes,
            unconfirmed=self.link.unconfirmed,
        )

    async def close(self, timeout_seconds: float) -> None:
        """Ends the link, in order if the neighbour is there to hear it."""
        if self.link.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self.link.close()
        self.link.fail(PeerError(f"the link to {self.node_id} was closed on this side"))

    def abort(self) -> None:
        """Ends the link at once; the neighbour notices that the connection is gone."""
        self.link.fail(PeerError(f"the link to {self.node_id} was given up on this side"))

    async def _dial(self) -> Link:
        unlikely = self._neighbour.dialling == DIALLING_RELAY
        if self._neighbour.address and not (unlikely and self._tried):
            # Perhaps it is on the same network here, though it cannot be dialled from elsewhere.
            self._tried = True
            with contextlib.suppress(PeerError):
                connection = await self._dial_directly(TRY_SECONDS if unlikely else DIRECT_SECONDS)
                self._route = "direct"
                return connection
        connection = await self._client.relay(self.name)
        self._route = "relayed"
        return connection

    async def _dial_directly(self, timeout_seconds: float) -> Link:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await dial_link(self._neighbour.address, self.node_id, self._node, self.name)
        except TimeoutError:
            raise PeerError(f"{self.node_id} does not answer at {self._neighbour.address}") from None

    async def _return_to_direct(self) -> None:
        """A link that could be direct and is relayed, after a cut on the way say, tries again now and then."""
        if self._neighbour.dialling == DIALLING_AWAIT or not self._neighbour.address:
            return
        while not self.link.over:
            await asyncio.sleep(RETURN_SECONDS)
            if self._route == "relayed" and self.link.connected:
                with contextlib.suppress(PeerError):
                    connection = await self._dial_directly(TRY_SECONDS)
                    self._route = "direct"
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
