"""Membership: who has joined the swarm, under which name, and over which streams it is spoken with."""

import asyncio
import contextlib
import hmac
import secrets
from dataclasses import dataclass

from ravnest import __version__
from ravnest.coordinator.waiting import Changes
from ravnest.errors import PeerError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.link import Control, Link
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION


@dataclass
class Member:
    """One provider that has joined."""

    node_id: str
    name: str
    session: str
    address: str
    device: str
    memory_bytes: int
    control: Control[CoordinatorMessage, ProviderMessage] | None = None
    feed: Link | None = None

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


class Members:
    """The providers of a swarm. All methods belong to the network's loop."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._members: dict[str, Member] = {}
        self.changes = Changes()

    def __getitem__(self, node_id: str) -> Member:
        return self._members[node_id]

    async def admit(self, request: JoinRequest) -> Member:
        """A new member; PeerError says why a provider is not admitted."""
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            raise PeerError("the invite's token is not valid for this swarm; ask the requester for a new invite")
        if request.protocol != PROTOCOL_VERSION or request.graph_format != FORMAT_VERSION:
            raise PeerError(
                f"this provider runs Ravnest {request.version} (protocol {request.protocol}, graph format "
                f"{request.graph_format}), the coordinator {__version__} (protocol {PROTOCOL_VERSION}, graph format "
                f"{FORMAT_VERSION}); update the older one"
            )
        number = len(self._members)
        taken = {m.node_id for m in self._members.values()}
        node_id = request.name or f"provider-{number}"
        while node_id in taken:
            number += 1
            node_id = f"{request.name or 'provider'}-{number}"
        member = Member(
            node_id, node_id, secrets.token_urlsafe(24), request.address, request.device, request.memory_bytes
        )
        self._members[node_id] = member
        return member

    def node_ids(self) -> list[str]:
        return list(self._members)

    def authenticate(self, session: str) -> str | None:
        for member in self._members.values():
            if hmac.compare_digest(session.encode(), member.session.encode()):
                return member.node_id
        return None

    async def wait_for(self, count: int) -> list[Member]:
        """The first `count` members that are connected, ordered by name; waits until there are as many."""
        await self.changes.until(lambda: len(self.connected()) >= count)
        return sorted(self.connected()[:count], key=lambda m: (len(m.node_id), m.node_id))

    async def wait_until_gone(self, timeout_seconds: float) -> None:
        """Until every member has ended its control stream, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.changes.until(lambda: all(m.control is None for m in self._members.values()))

    def connected(self) -> list[Member]:
        return [m for m in self._members.values() if m.control is not None and m.feed is not None]
