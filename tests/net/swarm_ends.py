"""Small handlers and helpers for tests of the transport: both ends in one process, over real sockets and mutual TLS."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys
from ravnest.net.rpc.client import CoordinatorClient, dial_link
from ravnest.net.rpc.server import CoordinatorServer, ProviderServer
from ravnest.net.streams.frame_stream import Link, RelayEnd
from ravnest.net.v1.control_pb2 import CheckReply, CheckRequest, JoinReply, JoinRequest
from tests.net.secure_ends import run

__all__ = ["run"]


def a_node(admission: Admission, name: str, folder: Path | None = None) -> NodeIdentity:
    """A node that has joined the swarm."""
    node = NodeIdentity.new() if folder is None else NodeIdentity.open(folder)
    token = admission.invite("127.0.0.1", 1).token
    admitted = admission.join(Identity("invite", token.id), node.request(), name)
    node.adopt(admitted.certificate, admission.authority.certificate)
    return node


SWARM = Admission.in_memory()
BEFORE, CALLED, OTHER = (a_node(SWARM, name) for name in ("before", "called", "other"))


class Provider:
    """A provider whose links are served by a function."""

    def __init__(self, serve: Callable[[Link], Awaitable[None]]) -> None:
        self.serve = serve
        self.server: ProviderServer
        self.errors: list[BaseException] = []
        self.over = asyncio.Event()

    async def link(self, peer: str, link: Link) -> None:
        try:
            await self.serve(link)
        except (PeerError, asyncio.CancelledError) as error:
            self.errors.append(error)
            raise
        finally:
            self.over.set()


@asynccontextmanager
async def provider(serve: Callable[[Link], Awaitable[None]]) -> AsyncIterator[tuple[Provider, str]]:
    """A running provider, the node `called`, and its address. The stage before it is on the node `before`."""
    handler = Provider(serve)
    server = ProviderServer(handler, CALLED)
    server.neighbours = {BEFORE.node_id}
    handler.server = server
    port = await server.start("127.0.0.1", 0)
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_seconds=0)


@asynccontextmanager
async def linked(serve: Callable[[Link], Awaitable[None]]) -> AsyncIterator[tuple[Provider, Link]]:
    """A running provider and a link to it."""
    async with provider(serve) as (handler, address):
        link = await dial_link(address, CALLED.node_id, BEFORE)
        try:
            yield handler, link
        finally:
            link.abort()
            await link.stream.finished()


class Coordinator:
    """A coordinator that keeps artifacts and uploads in memory."""

    def __init__(self) -> None:
        self.admission = Admission.in_memory()
        self.server = CoordinatorServer(self, self.admission.server_keys, self.admission.caller)
        self.port = 0
        self.joins = 0
        self.artifacts: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.upload_errors: list[BaseException] = []
        self.upload_begun = asyncio.Event()
        self.upload_over = asyncio.Event()
        self._clients: list[CoordinatorClient] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def invite(self) -> SwarmInvite:
        return self.admission.invite("127.0.0.1", self.port)

    def client(self, keys: TlsKeys, shown: str = "what this test showed") -> CoordinatorClient:
        """A connection with these keys, closed when the test is over."""
        self._clients.append(CoordinatorClient(self.address, keys, shown))
        return self._clients[-1]

    def joiner(self, invite: SwarmInvite | None = None) -> CoordinatorClient:
        """A connection of the holder of an invite."""
        return self.client(joiner_keys((invite or self.invite()).token, self.admission.authority.certificate))

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.stop(grace_seconds=0)

    async def join(self, identity: Identity, request: JoinRequest, seen_host: str) -> JoinReply:
        self.joins += 1
        admitted = self.admission.join(identity, request.certificate_request, request.name)
        return JoinReply(
            node_id=admitted.node_id, certificate=admitted.certificate, heartbeat_seconds=2.0, session=seen_host
        )

    async def check(self, identity: Identity, request: CheckRequest, seen_host: str) -> CheckReply:
        good, reason = self.admission.check(identity)
        return CheckReply(good=good, reason=reason)

    async def control(self, node_id: str, connection: Link) -> None:
        while (frame := await connection.receive()) is not None:
            await connection.send(Frame(FrameKind.CONTROL, frame.microbatch + 1, tensors=frame.tensors))

    async def feed(self, node_id: str, connection: Link) -> None:
        while (frame := await connection.receive()) is not None:
            await connection.send(Frame(FrameKind.DONE, frame.microbatch))

    async def relay(self, node_id: str, end: RelayEnd) -> None:
        while (message := await end.stream.receive()) is not None:
            await end.stream.send(message)

    async def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        if artifact not in self.artifacts:
            raise PeerError(f"there is no artifact {artifact}")
        yield self.artifacts[artifact][offset:]

    async def upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        received = bytearray()
        try:
            async for chunk in chunks:
                received += chunk
                self.upload_begun.set()
                if received.startswith(b"refuse me"):
                    raise PeerError("the disk is full; free some space")
        except PeerError as error:
            self.upload_errors.append(error)
            raise
        finally:
            self.upload_over.set()
        self.uploads[name] = bytes(received)


@asynccontextmanager
async def coordinator() -> AsyncIterator[tuple[Coordinator, CoordinatorClient]]:
    """A running coordinator, and a connection of the node `node-1` that has joined it."""
    handler = Coordinator()
    handler.port = await handler.server.start("127.0.0.1", 0)
    try:
        yield handler, handler.client(a_node(handler.admission, "node-1").tls_keys())
    finally:
        await handler.close()


async def echo(link: Link) -> None:
    """Send back what comes until the caller has said all."""
    while (frame := await link.receive()) is not None:
        await link.send(frame)
