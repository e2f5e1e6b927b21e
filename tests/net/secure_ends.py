"""Both ends of mutual TLS in one process, over real sockets: a coordinator that admits, and a node that listens."""

import asyncio
import atexit
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.invites import TokenStore
from ravnest.errors import PeerError
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.identity import COORDINATOR_HOST, Callers, node_host
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys, open_secure_channel, server_credentials, tls_failure
from ravnest.net.rpc.first_contact import pin_authority

TEST_SECONDS = 30.0

# One loop for all tests: gRPC may complete something of a call that is over after the server has stopped, and a loop
# that is closed by then would be complained about in the test that comes next.
_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test; a hang is a failure, and so is a task left behind with an error."""

    async def bounded() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(TEST_SECONDS):
            await test
        assert not complaints, complaints

    _RUNNER.run(bounded())


class Clock:
    """The coordinator's clock, set by hand."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class SecureCoordinator:
    """A coordinator with the calls Join, for invites, and Work, for nodes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.admission = Admission(SwarmAuthority.new(), TokenStore(), self.clock)
        self.port = 0
        self.calls = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def invite(self, **limits: Any) -> SwarmInvite:
        return self.admission.invite("127.0.0.1", self.port, **limits)

    async def join(self, request: bytes, context: Any) -> bytes:
        identity = self.admission.caller(context.auth_context(), ["invite"], "Join")
        return self.admission.join(identity, request, "Anna's PC").certificate

    async def work(self, request: bytes, context: Any) -> bytes:
        return self.admission.caller(context.auth_context(), ["node"], "Work").name.encode()


@asynccontextmanager
async def secure_coordinator() -> AsyncIterator[SecureCoordinator]:
    """A running coordinator."""
    coordinator = SecureCoordinator()

    def counted(call: Callable[[bytes, Any], Awaitable[bytes]]) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def serve(request: bytes, context: Any) -> bytes:
            coordinator.calls += 1
            return await call(request, context)

        return serve

    calls = {"Join": counted(coordinator.join), "Work": counted(coordinator.work)}
    async with serving(calls, coordinator.admission.server_credentials()) as coordinator.port:
        yield coordinator


@asynccontextmanager
async def serving(
    calls: dict[str, Callable[[bytes, Any], Awaitable[bytes]]], credentials: grpc.ServerCredentials
) -> AsyncIterator[int]:
    """The port of a server whose PeerErrors reach the caller as such."""

    def method(call: Callable[[bytes, Any], Awaitable[bytes]]) -> Any:
        async def serve(request: bytes, context: Any) -> bytes:
            try:
                return await call(request, context)
            except PeerError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                raise

        return grpc.unary_unary_rpc_method_handler(serve)

    server = aio.server()
    methods = {name: method(call) for name, call in calls.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Swarm", methods),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def listening_node(node: NodeIdentity, authority: Certificate) -> AsyncIterator[str]:
    """The address of a node that tells its callers who they are."""

    async def link(request: bytes, context: Any) -> bytes:
        return str(Callers(authority).identify(context.auth_context())).encode()

    async with serving({"Link": link}, server_credentials(node.tls_keys)) as port:
        yield f"127.0.0.1:{port}"


async def call(address: str, keys: TlsKeys, method: str, request: bytes = b"", host: str = COORDINATOR_HOST) -> bytes:
    """The reply; a PeerError whether TLS or the other side refuses."""
    return await call_on(open_secure_channel(address, keys, host), address, method, request)


async def call_on(channel: aio.Channel, address: str, method: str, request: bytes = b"") -> bytes:
    """The same on a channel of the caller's making, which is closed afterwards."""
    try:
        return bytes(await channel.unary_unary(f"/test.Swarm/{method}")(request, timeout=10))
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise PeerError(error.details() or "") from None
        failure = tls_failure(f"the node at {address}", "what this test showed", error.details())
        raise failure or AssertionError(error.details()) from None
    finally:
        await channel.close()


async def join(invite: SwarmInvite, node: NodeIdentity | None = None) -> NodeIdentity:
    """Join as a provider does: pin, show the invite, send a request, adopt the certificate."""
    node = node or NodeIdentity.new()
    authority = await pin_authority(invite)
    reply = await call(invite.address, joiner_keys(invite.token, authority), "Join", node.request())
    node.adopt(reply, authority)
    return node


async def link(address: str, node: NodeIdentity, expected_node: str) -> str:
    """Dial a neighbour; returns who it says is calling."""
    return (await call(address, node.tls_keys(), "Link", host=node_host(expected_node))).decode()


@asynccontextmanager
async def plain_server(reply: bytes, *, hang: bool = False) -> AsyncIterator[int]:
    """The port of a server that speaks no TLS: it sends `reply`, then hangs up or waits for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        if hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
