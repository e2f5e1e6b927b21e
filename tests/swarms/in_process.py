"""A swarm under attack: a real coordinator's port with mutual TLS, honest providers beside the adversary, and what the
coordinator was told of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from ravnest import __version__
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.invites import TokenStore
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import DEFAULT_LIMITS, Swarm, SwarmLimits
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import MAGIC, Frame, FrameKind
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.identity import COORDINATOR_HOST
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys, open_secure_channel
from ravnest.net.rpc.call_server import LINK_KEY
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import ArtifactRef, CoordinatorMessage, Deploy, JoinReply, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.membership.session import SwarmSession
from tests.net.secure_ends import Clock, run

__all__ = ["A_PICKLE", "Joined", "LocalSwarm", "RawStream", "attacked", "raw_stream", "refusal", "run"]

RawStream = aio.StreamStreamCall[bytes, bytes]

A_PICKLE = b"cos\nsystem\n(S'touch /tmp/ravnest-was-here'\ntR."
"""Unpickling this runs a command."""


class Told:
    """What the coordinator's run is told, and remembers."""

    def __init__(self) -> None:
        self.joined_ids: list[str] = []
        self.messages: list[tuple[str, ProviderMessage]] = []
        self.frames: list[tuple[str, FrameKind, int]] = []
        self.down: list[tuple[str, str]] = []
        self.back: list[str] = []
        self.gone: list[tuple[str, str]] = []
        self.turned: list[tuple[str, int, str]] = []
        self.changes = Changes()

    def joined(self, member: Member) -> None:
        self.joined_ids.append(member.node_id)

    def said(self, node_id: str, message: ProviderMessage) -> None:
        self.messages.append((node_id, message))
        self.changes.notify()

    def returned(self, node_id: str, frame: Frame) -> None:
        self.frames.append((node_id, frame.kind, frame.microbatch))
        self.changes.notify()

    def disconnected(self, node_id: str, reason: str) -> None:
        self.down.append((node_id, reason))
        self.changes.notify()

    def reconnected(self, node_id: str) -> None:
        self.back.append(node_id)
        self.changes.notify()

    def vanished(self, node_id: str, reason: str) -> None:
        self.gone.append((node_id, reason))
        self.changes.notify()

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        self.turned.append((address, connections, reason))
        self.changes.notify()

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        async for _ in chunks:
            pass


@dataclass
class Joined:
    """A node in this process, honest or not."""

    node: NodeIdentity
    client: CoordinatorClient
    session: str
    stay: SwarmSession
    connecting: "asyncio.Task[None] | None" = None

    @property
    def id(self) -> str:
        return self.node.node_id

    @property
    def control(self) -> ControlLink[ProviderMessage, CoordinatorMessage]:
        return self.stay.control

    @property
    def feed(self) -> ResumableLink:
        return self.stay.feed

    async def break_off(self) -> None:
        """Makes no more connections, and drops those there are: what is dialled by hand is not disturbed."""
        if self.connecting is not None:
            self.connecting.cancel()
            await asyncio.gather(self.connecting, return_exceptions=True)


class LocalSwarm:
    """One coordinator. Everything that was opened is closed with it."""

    def __init__(self, limits: SwarmLimits = DEFAULT_LIMITS) -> None:
        self.clock = Clock()
        self.admission = Admission(SwarmAuthority.new(), TokenStore(), self.clock)
        self.swarm = Swarm(self.admission, limits=limits)
        self.told = Told()
        self.swarm.events = self.told
        self.port = 0
        self._clients: list[CoordinatorClient] = []
        self._nodes: list[Joined] = []
        self._admitted: set[str] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def invite(self, **limits: Any) -> SwarmInvite:
        return self.admission.invite("127.0.0.1", self.port, **limits)

    def client(self, keys: TlsKeys) -> CoordinatorClient:
        """A connection with these keys, whosever they are."""
        self._clients.append(CoordinatorClient(self.address, keys, "this"))
        return self._clients[-1]

    def holder(self, invite: SwarmInvite) -> CoordinatorClient:
        """A connection of somebody who has this invite."""
        return self.client(joiner_keys(invite.token, self.admission.authority.certificate))

    async def admit(self, name: str, invite: SwarmInvite | None = None, node: NodeIdentity | None = None) -> Joined:
        """Joined, and without any connection yet."""
        node = node or NodeIdentity.new()
        reply = await self.holder(invite or self.invite()).join(a_request(node.request(), name))
        node.adopt(reply.certificate, self.admission.authority.certificate)
        client = self.client(node.tls_keys())
        self._admitted.add(node.node_id)
        return Joined(node, client, reply.session, SwarmSession(client, reply.session))

    async def join(self, name: str, invite: SwarmInvite | None = None, node: NodeIdentity | None = None) -> Joined:
        """Joined and connected, as an honest provider does it."""
        joined = await self.admit(name, invite, node)
        joined.connecting = asyncio.create_task(joined.stay.keep_connected())
        self._nodes.append(joined)
        await self.swarm.members.changes.until(lambda: joined.id in self.connected())
        return joined

    async def ask(self, invite: SwarmInvite, request: JoinRequest) -> JoinReply:
        return await self.holder(invite).join(request)

    def connected(self) -> list[str]:
        return sorted(member.node_id for member in self.swarm.members.connected())

    async def deploy(self, node_id: str, stage: int, stages: int, **artifacts: bytes) -> None:
        """Gives a node its stage, and the artifacts that are its own."""
        order = Deploy(deployment="d1", stage=stage, stages=stages, generation=1)
        for field, data in artifacts.items():
            name = f"{field}-{stage}"
            self.swarm.artifacts[name] = Artifact(name, "", len(data), lambda offset, data=data: iter([data[offset:]]))
            getattr(order, field).CopyFrom(ArtifactRef(id=name, size_bytes=len(data)))
        await self.swarm.tell(node_id, CoordinatorMessage(deploy=order))

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.told.changes.until(condition)

    async def still_works(self, honest: Joined) -> None:
        """Whoever did nothing wrong goes on: it speaks and is heard."""
        before = len(self.told.messages)
        await honest.control.send(ProviderMessage(ready={"deployment": "d1"}))
        await self.until(lambda: len(self.told.messages) > before)
        assert self.told.messages[-1][0] == honest.id
        assert honest.id in self.connected()

    async def dropped(self, node_id: str) -> str:
        """The reason why this node was dropped, once it was."""
        await self.until(lambda: any(gone == node_id for gone, _ in self.told.gone))
        assert node_id not in self.connected()
        return next(reason for gone, reason in self.told.gone if gone == node_id)

    async def close(self) -> None:
        for joined in self._nodes:
            await joined.break_off()
        for client in self._clients:
            await client.close()
        # A coordinator gives its members a second to go. These are gone, and would not say so; others, in processes of
        # their own, are told that it is over, and end by themselves.
        for node_id in self._admitted.intersection(self.swarm.members.node_ids()):
            self.swarm.members.remove(node_id, "the test is over")
        await self.swarm.stop("the test is over")


async def raw_stream(swarm: LocalSwarm, joined: Joined, method: str, resume: int | None = 0) -> RawStream:
    """A stream to the coordinator on which anything can be sent; a link is begun on it with the count `resume`.

    The node's own connections are broken off: they would take the place of this one again.
    """
    await joined.break_off()
    channel = open_secure_channel(swarm.address, joined.node.tls_keys(), COORDINATOR_HOST)
    call: RawStream = channel.stream_stream(f"/ravnest.v1.Coordinator/{method}")(metadata=((LINK_KEY, joined.session),))
    await call.initial_metadata()
    if method in ("Control", "Feed") and resume is not None:
        await call.write(encode(Frame(FrameKind.RESUME, resume)))
    return call


async def refusal(call: RawStream) -> str:
    """How the other side ends a stream: with a last message, or with the status of the call."""
    try:
        message = MAGIC
        while message.startswith(MAGIC):
            message = bytes(await call.read())  # type: ignore[arg-type]
        return message.decode(errors="replace")
    except aio.AioRpcError as error:
        return error.details() or ""


def a_request(certificate_request: bytes, name: str = "mallory", **changes: Any) -> JoinRequest:
    request = JoinRequest(
        certificate_request=certificate_request,
        name=name,
        address="127.0.0.1:7701",
        version=__version__,
        protocol=PROTOCOL_VERSION,
        graph_format=FORMAT_VERSION,
        device="cpu",
        memory_bytes=8 << 30,
        cores=1,
    )
    for field, value in changes.items():
        setattr(request, field, value)
    return request


@asynccontextmanager
async def attacked(limits: SwarmLimits = DEFAULT_LIMITS) -> AsyncIterator[LocalSwarm]:
    made = LocalSwarm(limits)
    made.port = await made.swarm.start()
    try:
        yield made
    finally:
        await made.close()
