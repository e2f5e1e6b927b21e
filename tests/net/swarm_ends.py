"""Small handlers and helpers for tests of the transport: both ends in one process, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ravnest.errors import PeerError
from ravnest.net import (
    Control,
    CoordinatorClient,
    CoordinatorServer,
    Credentials,
    Frame,
    FrameKind,
    Link,
    ProviderServer,
    dial_link,
    same_secret,
)
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinReply, JoinRequest, ProviderMessage

SECRET = "the-swarm-secret"
TEST_SECONDS = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own; a hang is a failure, and so is a task left behind with an error."""

    async def bounded() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(TEST_SECONDS):
            await test
        assert not complaints, complaints

    asyncio.run(bounded())


class Provider:
    """A provider whose links are served by a function."""

    def __init__(self, serve: Callable[[Link], Awaitable[None]]) -> None:
        self.serve = serve
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

    def authenticate(self, session: str) -> str | None:
        return "before" if same_secret(session, SECRET) else None


@asynccontextmanager
async def provider(serve: Callable[[Link], Awaitable[None]]) -> AsyncIterator[tuple[Provider, str]]:
    """A running provider and its address."""
    handler = Provider(serve)
    server = ProviderServer(handler, Credentials.loopback())
    port = await server.start("127.0.0.1", 0)
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_seconds=0)


@asynccontextmanager
async def linked(serve: Callable[[Link], Awaitable[None]]) -> AsyncIterator[tuple[Provider, Link]]:
    """A running provider and a link to it."""
    async with provider(serve) as (handler, address):
        link = await dial_link(address, SECRET)
        try:
            yield handler, link
        finally:
            link.abort()
            await link.stream.finished()


class Coordinator:
    """A coordinator that admits the token "good" and keeps artifacts and uploads in memory."""

    def __init__(self) -> None:
        self.artifacts: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.upload_errors: list[BaseException] = []
        self.upload_begun = asyncio.Event()
        self.upload_over = asyncio.Event()

    async def join(self, request: JoinRequest) -> JoinReply:
        if request.token != "good":
            raise PeerError(f"the token of {request.name} is not valid; ask for a new invite")
        return JoinReply(node_id="node-1", session="session-1", heartbeat_seconds=2.0)

    async def control(self, node_id: str, control: Control[CoordinatorMessage, ProviderMessage]) -> None:
        while (message := await control.receive()) is not None:
            reply = CoordinatorMessage()
            reply.start.deployment = f"{node_id} {message.ready.deployment}"
            await control.send(reply)

    async def feed(self, node_id: str, link: Link) -> None:
        while (frame := await link.receive()) is not None:
            await link.send(Frame(FrameKind.DONE, frame.microbatch))

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

    def authenticate(self, session: str) -> str | None:
        return "node-1" if same_secret(session, "session-1") else None


@asynccontextmanager
async def coordinator() -> AsyncIterator[tuple[Coordinator, CoordinatorClient]]:
    """A running coordinator and a client that has not joined yet."""
    handler = Coordinator()
    server = CoordinatorServer(handler, Credentials.loopback())
    port = await server.start("127.0.0.1", 0)
    client = CoordinatorClient(f"127.0.0.1:{port}")
    try:
        yield handler, client
    finally:
        await client.close()
        await server.stop(grace_seconds=0)


async def echo(link: Link) -> None:
    """Send back what comes until the caller has said all."""
    while (frame := await link.receive()) is not None:
        await link.send(frame)
