"""Swarm in this process, without a run: providers join and connect over real sockets, and its events are recorded."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ravnest import __version__
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import DEFAULT_LIMITS, Swarm, SwarmLimits
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import ArtifactRef, CoordinatorMessage, Deploy, JoinReply, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.membership.session import SwarmSession


def join_request(node: NodeIdentity, name: str = "anna", **changes: object) -> JoinRequest:
    request = JoinRequest(
        certificate_request=node.request(),
        name=name,
        address="127.0.0.1:7701",
        version=__version__,
        protocol=PROTOCOL_VERSION,
        graph_format=FORMAT_VERSION,
    )
    for field, value in changes.items():
        setattr(request, field, value)
    return request


class RecordedEvents:
    """The events of a swarm, recorded."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, FrameKind]] = []
        self.gone: list[tuple[str, str]] = []
        self.down: list[str] = []
        self.back: list[str] = []
        self.changes = Changes()

    def joined(self, member: Member) -> None:
        pass

    def said(self, node_id: str, message: ProviderMessage) -> None:
        pass

    def returned(self, node_id: str, frame: Frame) -> None:
        self.frames.append((node_id, frame.kind))
        self.changes.notify()

    def disconnected(self, node_id: str, reason: str) -> None:
        self.down.append(node_id)
        self.changes.notify()

    def reconnected(self, node_id: str) -> None:
        self.back.append(node_id)
        self.changes.notify()

    def vanished(self, node_id: str, reason: str) -> None:
        self.gone.append((node_id, reason))
        self.changes.notify()

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        raise AssertionError("nobody is turned away here")

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        raise AssertionError("nothing is uploaded here")


@dataclasses.dataclass
class Provider:
    """A provider in this process."""

    node: NodeIdentity
    client: CoordinatorClient
    session: SwarmSession
    connecting: asyncio.Task[None]

    @property
    def control(self) -> ControlLink[ProviderMessage, CoordinatorMessage]:
        return self.session.control

    @property
    def feed(self) -> ResumableLink:
        return self.session.feed

    async def break_off(self) -> None:
        """Breaks the connections for good, as the end of the process does."""
        self.connecting.cancel()
        await asyncio.gather(self.connecting, return_exceptions=True)


class ConnectedSwarm:
    """A swarm, and providers that join it."""

    def __init__(self, limits: SwarmLimits) -> None:
        self.swarm = Swarm(Admission.in_memory(), limits=limits)
        self.recorded = RecordedEvents()
        self.swarm.events = self.recorded
        self.port = 0
        self._clients: list[CoordinatorClient] = []
        self.providers: list[Provider] = []

    def invite(self, uses: int = 9) -> SwarmInvite:
        return self.swarm.admission.invite("127.0.0.1", self.port, uses=uses)

    async def ask(self, invite: SwarmInvite, request: JoinRequest) -> JoinReply:
        client = self._client(CoordinatorClient(invite.address, joiner_keys(invite.token, self.authority), "this"))
        return await client.join(request)

    async def provider(self, name: str, node: NodeIdentity | None = None) -> Provider:
        """A provider that has joined and is connected."""
        node = node or NodeIdentity.new()
        reply = await self.ask(self.invite(), join_request(node, name))
        node.adopt(reply.certificate, self.authority)
        client = self._client(CoordinatorClient(f"127.0.0.1:{self.port}", node.tls_keys(), name))
        session = SwarmSession(client, reply.session)
        provider = Provider(node, client, session, asyncio.create_task(session.keep_connected()))
        self.providers.append(provider)
        await self.swarm.members.changes.until(
            lambda: any(m.node_id == node.node_id for m in self.swarm.members.connected())
        )
        return provider

    async def deploy(
        self, provider: Provider, stage: int, stages: int, artifact: str = "", generation: int = 1
    ) -> None:
        order = Deploy(
            deployment="d", stage=stage, stages=stages, generation=generation, graph=ArtifactRef(id=artifact)
        )
        await self.swarm.tell(provider.node.node_id, CoordinatorMessage(deploy=order))

    async def break_connections(self, node_id: str) -> None:
        """Breaks the connections of a provider, which connects again at once."""
        [provider] = [provider for provider in self.providers if provider.node.node_id == node_id]
        await provider.break_off()
        provider.connecting = asyncio.create_task(provider.session.keep_connected())

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.recorded.changes.until(condition)

    async def close(self) -> None:
        for provider in self.providers:
            await provider.break_off()
        for client in self._clients:
            await client.close()
        # The swarm would wait a second for each to leave.
        for node_id in self.swarm.members.node_ids():
            self.swarm.members.remove(node_id, "the test is over")
        await self.swarm.stop("the test is over")

    def _client(self, client: CoordinatorClient) -> CoordinatorClient:
        self._clients.append(client)
        return client

    @property
    def authority(self) -> Certificate:
        return self.swarm.admission.authority.certificate


@asynccontextmanager
async def connected_swarm(limits: SwarmLimits = DEFAULT_LIMITS) -> AsyncIterator[ConnectedSwarm]:
    made = ConnectedSwarm(limits)
    made.port = await made.swarm.start()
    try:
        yield made
    finally:
        await made.close()


def done(microbatch: int, generation: int = 1) -> Frame:
    return Frame(FrameKind.DONE, microbatch, generation=generation)
