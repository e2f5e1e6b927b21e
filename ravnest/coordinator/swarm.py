"""The coordinator's side of every provider: admits them, hands out artifacts, and passes on what they say.

It decides nothing about training: a `SwarmEvents` does, and is told of everything that happens.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Protocol

from ravnest.coordinator.members import Member, Members
from ravnest.coordinator.prepare import Artifact
from ravnest.errors import PeerError
from ravnest.net.credentials import Credentials
from ravnest.net.frames import Frame
from ravnest.net.invite import Invite
from ravnest.net.link import Control, Link
from ravnest.net.server import CoordinatorServer
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinReply, JoinRequest, ProviderMessage, Stop

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

    def __init__(self) -> None:
        self.events: SwarmEvents | None = None
        """Who is told; a run sets it when it begins. What happens while nobody listens is only kept as membership."""
        self.generation = 0
        """Number of the newest deployment; frames of earlier ones are refused."""
        self._token = secrets.token_urlsafe(24)
        self._server = CoordinatorServer(self, Credentials.loopback())
        self.members = Members(self._token)
        self.link_secret = secrets.token_urlsafe(24)
        self.artifacts: dict[str, Artifact] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> Invite:
        """Listens, and gives the invite that providers join with; RunError when the port is taken."""
        return Invite(host, await self._server.start(host, port), self._token)

    async def stop(self, reason: str) -> None:
        """Tells every provider to stop, gives them a moment to go, and stops listening."""
        for node_id in self.members.node_ids():
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.tell(node_id, CoordinatorMessage(stop=Stop(reason=reason)))
        await self.members.wait_until_gone(_STOP_SECONDS)
        await self._server.stop()

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        """Says something to a provider; PeerError when it is gone."""
        control = self.members[node_id].control
        if control is None:
            raise PeerError(f"{node_id} is not connected")
        await control.send(message)

    async def feed_frame(self, node_id: str, frame: Frame) -> None:
        """Sends a frame to a stage, waiting while it is slow; PeerError when it is gone."""
        link = self.members[node_id].feed
        if link is None:
            raise PeerError(f"{node_id} is not connected")
        await link.send(frame)

    def authenticate(self, session: str) -> str | None:
        return self.members.authenticate(session)

    async def join(self, request: JoinRequest) -> JoinReply:
        member = await self.members.admit(request)
        if self.events is not None:
            self.events.joined(member)
        return JoinReply(node_id=member.node_id, session=member.session, heartbeat_seconds=HEARTBEAT_SECONDS)

    async def control(self, node_id: str, control: Control[CoordinatorMessage, ProviderMessage]) -> None:
        member = self.members[node_id]
        member.control = control
        self.members.changes.notify()
        reason = "it ended its connection"
        try:
            while (message := await control.receive()) is not None:
                if self.events is not None:
                    self.events.said(node_id, message)
        except PeerError as error:
            reason = str(error)
        finally:
            member.control = None
            if self.events is not None:
                self.events.vanished(node_id, reason)
            self.members.changes.notify()

    async def feed(self, node_id: str, link: Link) -> None:
        member = self.members[node_id]
        member.feed = link
        self.members.changes.notify()
        try:
            while (frame := await link.receive()) is not None:
                if self.events is not None:
                    self.events.returned(node_id, frame)
        finally:
            member.feed = None

    async def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        found = self.artifacts.get(artifact)
        if found is None:
            raise PeerError(f"there is no artifact {artifact!r} here")
        passed = 0
        for chunk in found.open():
            if passed + len(chunk) > offset:
                yield chunk[max(0, offset - passed) :]
            passed += len(chunk)

    async def upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        if self.events is None:
            raise PeerError("there is no run to upload to")
        await self.events.uploaded(node_id, name, chunks)
