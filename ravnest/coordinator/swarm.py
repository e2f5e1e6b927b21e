"""The coordinator's side of every provider: admits them, hands out artifacts, and passes on what they say.

It decides nothing about training: a `SwarmEvents` does, and is told of everything that happens.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

from ravnest import __version__
from ravnest.coordinator.admission import Admission
from ravnest.coordinator.measures import hear
from ravnest.coordinator.members import Member, Members, check_version
from ravnest.coordinator.prepare import Artifact
from ravnest.errors import PeerError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.address import split_address
from ravnest.net.frames import Frame, FrameKind
from ravnest.net.identity import Identity
from ravnest.net.link import Control, Link
from ravnest.net.server import CoordinatorServer
from ravnest.net.v1.control_pb2 import (
    CheckReply,
    CheckRequest,
    CoordinatorMessage,
    Deploy,
    JoinReply,
    JoinRequest,
    ProviderMessage,
    Stop,
)
from ravnest.net.version import PROTOCOL_VERSION

HEARTBEAT_SECONDS = 1.0
_STOP_SECONDS = 1.0


class SwarmEvents(Protocol):
    """Who is told what providers do. All calls come on the network's loop."""

    def joined(self, member: Member) -> None:
        """A provider has been admitted."""

    def said(self, node_id: str, message: ProviderMessage) -> None:
        """A provider reports, is ready, has failed or leaves."""

    def returned(self, node_id: str, frame: Frame) -> None:
        """A stage has sent a result or finished a microbatch."""

    def vanished(self, node_id: str, reason: str) -> None:
        """A provider's stream has ended, in order or not."""

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """A stage uploads its state."""


class Swarm:
    """A server and its members. Made and used on the network's loop."""

    def __init__(self, admission: Admission, *, open_to_more: bool = True) -> None:
        """`admission` says who gets in; it is closed when the swarm stops."""
        self.admission = admission
        self.open_to_more = open_to_more
        """Whether somebody else may come in the place of a provider that leaves before it has a stage."""
        self.events: SwarmEvents | None = None
        """Who is told; a run sets it when it begins. What happens while nobody listens is only kept as membership."""
        self.generation = 0
        """Number of the newest deployment; frames of earlier ones are refused."""
        self.host = ""
        """Where the coordinator listens; providers there share its cores."""
        self._server = CoordinatorServer(self, admission.server_credentials(), admission.caller)
        self.members = Members()
        self.artifacts: dict[str, Artifact] = {}
        self._orders: dict[str, Deploy] = {}
        """The newest order to each node: what it may fetch and send follows from it."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens; the port, chosen by the system for port 0. RunError when it is taken."""
        self.host = host
        return await self._server.start(host, port)

    async def stop(self, reason: str) -> None:
        """Tells every provider to stop, gives them a moment to go, and stops listening."""
        for node_id in self.members.node_ids():
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.tell(node_id, CoordinatorMessage(stop=Stop(reason=reason)))
        await self.members.wait_until_gone(_STOP_SECONDS)
        await self._server.stop()
        self.admission.close()

    def expel(self, node_id: str, reason: str = "") -> None:
        """Ends every stream of a node that was thrown out, and forgets it."""
        because = f" ({reason})" if reason else ""
        self.members.remove(node_id)
        self._server.drop(
            node_id, f"{node_id} was thrown out of the swarm{because}; ask the requester for a new invite"
        )

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        """Says something to a provider; PeerError when it is gone."""
        control = self.members[node_id].control
        if control is None:
            raise PeerError(f"{node_id} is not connected")
        if message.HasField("deploy"):
            self._orders[node_id] = message.deploy
        await control.send(message)

    async def feed_frame(self, node_id: str, frame: Frame) -> None:
        """Sends a frame to a stage, waiting while it is slow; PeerError when it is gone."""
        link = self.members[node_id].feed
        if link is None:
            raise PeerError(f"{node_id} is not connected")
        await link.send(frame)

    async def join(self, identity: Identity, request: JoinRequest) -> JoinReply:
        # Before the invite is used: a provider that cannot take part should not use it up.
        check_version(request)
        split_address(request.address)
        admitted = await asyncio.to_thread(self.admission.join, identity, request.certificate_request, request.name)
        member = Member.of(admitted.node_id, request)
        if member.node_id in self.members:
            self._server.drop(member.node_id, f"{member.node_id} has joined again, over another connection")
        self.members.put(member)
        if self.events is not None and not member.measures_link:
            self.events.joined(member)
        return JoinReply(node_id=member.node_id, certificate=admitted.certificate, heartbeat_seconds=HEARTBEAT_SECONDS)

    async def check(self, identity: Identity, request: CheckRequest) -> CheckReply:
        good, reason = await asyncio.to_thread(self.admission.check, identity)
        return CheckReply(
            good=good,
            reason=reason,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            graph_format=FORMAT_VERSION,
            unix_seconds=time.time(),
        )

    async def control(self, node_id: str, control: Control[CoordinatorMessage, ProviderMessage]) -> None:
        member = self.members[node_id]
        member.control = control
        self.members.changes.notify()
        reason, left = "it ended its connection", ""
        try:
            while (message := await control.receive()) is not None:
                if self._hear_measures(member, message):
                    continue
                if message.HasField("leaving"):
                    left = f"it left: {message.leaving.reason}"
                if self.events is not None:
                    self.events.said(node_id, message)
        except PeerError as error:
            reason = str(error)
        finally:
            member.control = None
            if self.events is not None:
                self.events.vanished(node_id, left or reason)
            self.members.changes.notify()

    def _hear_measures(self, member: Member, message: ProviderMessage) -> bool:
        first = member.measures_link and message.HasField("measured") and not (member.link or member.link_error)
        heard = hear(self.members, member, message)
        if first and self.events is not None:
            # Only now is there something to tell: what kind of machine it is.
            self.events.joined(member)
        return heard

    async def feed(self, node_id: str, link: Link) -> None:
        member = self.members[node_id]
        member.feed = link
        self.members.changes.notify()
        try:
            while (frame := await link.receive()) is not None:
                order = self._orders.get(node_id)
                if order is not None and frame.generation < order.generation:
                    # Of a run that was given up: it was under way when the new order went out.
                    continue
                allowed, reason = may_return(node_id, order, frame)
                if not allowed:
                    raise PeerError(reason)
                if self.events is not None:
                    self.events.returned(node_id, frame)
        except PeerError as error:
            # A provider that cannot be fed is no use, and one that broke the rules is no friend.
            self._server.drop(node_id, str(error))
            raise
        finally:
            member.feed = None

    async def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        order = self._orders.get(node_id)
        found = self.artifacts.get(artifact)
        if found is None or order is None or artifact not in (order.graph.id, order.weights.id):
            raise PeerError(f"there is no artifact {artifact!r} for {node_id} here")
        passed = 0
        for chunk in found.open():
            if passed + len(chunk) > offset:
                yield chunk[max(0, offset - passed) :]
            passed += len(chunk)

    async def upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        if self.events is None:
            raise PeerError("there is no run to upload to")
        await self.events.uploaded(node_id, name, chunks)


def may_return(node_id: str, order: Deploy | None, frame: Frame) -> tuple[bool, str]:
    """Whether a node that was given this order may send this frame to the coordinator, and why."""
    if order is None:
        return False, f"{node_id} sent a {frame.kind.name} frame and holds no stage"
    if frame.kind is FrameKind.DONE and order.stage == 0:
        return True, f"{node_id} holds the root, where a microbatch ends"
    if frame.kind is FrameKind.RESULT and order.stage == order.stages - 1:
        return True, f"{node_id} holds the leaf, which computes the loss"
    return False, f"{node_id} sent a {frame.kind.name} frame, which is not for stage {order.stage} of {order.stages}"
