"""The gRPC servers of coordinator and provider, and the interfaces that handle their calls."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Final, Protocol

from ravnest.errors import PeerError, RefusedError
from ravnest.net.connection import CHUNK_BYTES
from ravnest.net.identity.identity import AuthContext, Identity, Kind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import TlsKeys
from ravnest.net.probe.measuring import MeasureService
from ravnest.net.rpc.call_server import CallServer, Method, OnTurnedAway, log_turned_away
from ravnest.net.streams.frame_stream import Control, Link, RelayEnd
from ravnest.net.v1.control_pb2 import (
    CheckReply,
    CheckRequest,
    Chunk,
    FetchRequest,
    JoinReply,
    JoinRequest,
    MeasureRequest,
    UploadReply,
)

COORDINATOR_SERVICE: Final = "ravnest.v1.Coordinator"
PROVIDER_SERVICE: Final = "ravnest.v1.Provider"

WhoCalls = Callable[[AuthContext, Collection[Kind], str], Identity]
"""Returns the identity of a caller; PeerError when it may not make the call."""


class CoordinatorHandler(Protocol):
    """Handles the calls of providers, on the coordinator's side.

    A RavnestError that a method raises reaches the provider as a PeerError with the same message. When a provider is
    gone, the handler's `receive` and `send` raise PeerError; the handler itself is cancelled only when the server
    stops. A `connection` carries the link that its `label` names, until it breaks.
    """

    async def join(self, identity: Identity, request: JoinRequest, seen_host: str) -> JoinReply:
        """Admit the holder of an invite, or a node that has joined before; a RavnestError says why not.

        `seen_host` is the host that the call comes from.
        """

    async def check(self, identity: Identity, request: CheckRequest, seen_host: str) -> CheckReply:
        """Tell whether the holder of an invite or a node could join, without admitting it."""

    async def control(self, node_id: str, connection: Link) -> None:
        """Exchange messages with a provider; the connection ends when this returns."""

    async def feed(self, node_id: str, connection: Link) -> None:
        """Exchange frames with a provider; the connection ends when this returns."""

    async def relay(self, node_id: str, end: RelayEnd) -> None:
        """Pass messages between this node and the other end of the link that it names; ends when this returns."""

    def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        """The bytes of an artifact from `offset` on, in pieces of any size."""

    async def upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Receive an upload completely; `chunks` raises PeerError when it breaks off before its end."""


class ProviderHandler(Protocol):
    """Handles the calls of neighbouring stages, on a provider."""

    async def link(self, peer: str, connection: Link) -> None:
        """Exchange frames with a neighbouring stage; the connection ends when this returns."""


class CoordinatorServer(CallServer):
    """Serves providers for a coordinator. Most calls are for nodes; the holder of an invite may join, check and
    measure."""

    service = COORDINATOR_SERVICE

    def __init__(
        self,
        handler: CoordinatorHandler,
        keys: Callable[[], TlsKeys],
        who_calls: WhoCalls,
        on_turned_away: OnTurnedAway = log_turned_away,
    ) -> None:
        super().__init__(keys, on_turned_away)
        self._handler = handler
        self._who_calls = who_calls
        self._measuring = MeasureService()

    def methods(self) -> dict[str, Method]:
        return {
            "Join": self.unary("Join", ["invite", "node"], JoinRequest, self._handler.join),
            "Control": self.stream("Control", Link, self._handler.control),
            "Feed": self.stream("Feed", Link, self._handler.feed),
            "Relay": self.stream("Relay", RelayEnd, self._handler.relay),
            "Fetch": self.stream("Fetch", lambda wire: Control(wire, FetchRequest), self._fetch),
            "Upload": self.stream("Upload", lambda wire: Control(wire, Chunk), self._upload),
            "Check": self.unary("Check", ["invite", "node"], CheckRequest, self._handler.check),
            "Measure": self.stream(
                "Measure", lambda wire: Control(wire, MeasureRequest), self._measuring.serve, ["invite", "node"]
            ),
        }

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        return self._who_calls(auth_context, kinds, call)

    async def _fetch(self, node_id: str, control: Control[Chunk, FetchRequest]) -> None:
        request = await control.receive()
        if request is None:
            raise RefusedError("the call names no artifact to fetch")
        offset, end = request.offset, request.end or None
        async for data in split(self._handler.fetch(node_id, request.artifact, offset)):
            if end is not None:
                data = data[: max(0, end - offset)]
            if not data:
                return
            await control.send(Chunk(data=data, offset=offset))
            offset += len(data)
            if offset == end:
                return

    async def _upload(self, node_id: str, control: Control[UploadReply, Chunk]) -> None:
        first = await control.receive()
        if first is None or not first.header.name:
            raise RefusedError("the upload does not begin with its name")
        received = 0

        async def chunks() -> AsyncGenerator[bytes, None]:
            nonlocal received
            chunk: Chunk | None = first
            while chunk is not None:
                if chunk.offset != received:
                    raise RefusedError(
                        f"the upload {first.header.name!r} goes on at byte {chunk.offset}, not {received}"
                    )
                if chunk.data:
                    received += len(chunk.data)
                    yield chunk.data
                if chunk.last:
                    return
                chunk = await control.receive()
            raise PeerError(f"the upload {first.header.name!r} ended before its last chunk")

        async with contextlib.aclosing(chunks()) as pieces:
            await self._handler.upload(node_id, first.header.name, pieces)
        await control.send(UploadReply(name=first.header.name, size_bytes=received))


class ProviderServer(CallServer):
    """Serves the neighbouring stages of a provider. All other nodes may only measure their connection to it.

    A deployment sets the `neighbours`, the nodes of neighbouring stages. `keepers` are nodes with which parts of
    replicas are exchanged, with or without a stage here. Only these two groups may link.
    """

    service = PROVIDER_SERVICE

    def __init__(
        self, handler: ProviderHandler, node: NodeIdentity, on_turned_away: OnTurnedAway = log_turned_away
    ) -> None:
        super().__init__(node.tls_keys, on_turned_away)
        self.neighbours: Collection[str] = ()
        self.keepers: Collection[str] = ()
        self._node = node
        self._handler = handler
        self._measuring = MeasureService()

    def methods(self) -> dict[str, Method]:
        return {
            "Link": self.stream("Link", Link, self._handler.link),
            "Measure": self.stream("Measure", lambda wire: Control(wire, MeasureRequest), self._measuring.serve),
        }

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        identity = self._node.caller(auth_context, kinds, call)
        if call == "Measure":
            return identity
        if identity.name not in self.neighbours and identity.name not in self.keepers:
            who = " and ".join(sorted({*self.neighbours, *self.keepers})) or "no node"
            raise PeerError(f"{identity} may not call {call}: {who} may, as neighbours of the stage here")
        return identity


async def split(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of at most CHUNK_BYTES, none of them empty."""
    async for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            yield piece[start : start + CHUNK_BYTES]
