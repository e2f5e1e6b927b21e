"""Membership: who has joined the swarm, and over which streams it is spoken with."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Self

from ravnest import __version__
from ravnest.coordinator.measures import PairAnswers, positive
from ravnest.coordinator.waiting import Changes
from ravnest.errors import PeerError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.link import Control, Link
from ravnest.net.measuring import LinkSpeed
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION


@dataclass
class Member:
    """One provider that has joined."""

    node_id: str
    address: str
    device: str
    memory_bytes: int
    threads: int = 0
    """What it computes with on a machine of its own; 0 where that is the coordinator's to say."""
    control: Control[CoordinatorMessage, ProviderMessage] | None = None
    feed: Link | None = None
    cores: int = 0
    flops_per_second: float = 0.0
    """As it measured itself; 0 where it did not, as in the embedded swarm, where all machines are one."""
    memory_bytes_per_second: float = 0.0
    device_name: str = ""
    measures_link: bool = False
    """Whether it measures its connection, and says what it found before it is ready."""
    link: LinkSpeed | None = None
    """Its connection to the coordinator, as it measured it."""
    link_error: str = ""
    """Why it could not."""

    @classmethod
    def of(cls, node_id: str, request: JoinRequest) -> Self:
        """The provider that this request has let in."""
        return cls(
            node_id,
            request.address,
            request.device,
            request.memory_bytes,
            request.threads,
            cores=request.cores,
            flops_per_second=positive(request.flops_per_second),
            memory_bytes_per_second=positive(request.memory_bytes_per_second),
            device_name=request.device_name,
            measures_link=request.measures_link,
        )

    @property
    def connected(self) -> bool:
        """Whether both of its streams are open and what it measures is known."""
        measured = not self.measures_link or self.link is not None or bool(self.link_error)
        return self.control is not None and self.feed is not None and measured

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


def check_version(request: JoinRequest) -> None:
    """PeerError for a provider that speaks another protocol or reads another graph format."""
    if request.protocol != PROTOCOL_VERSION or request.graph_format != FORMAT_VERSION:
        raise PeerError(
            f"this provider runs Ravnest {request.version} (protocol {request.protocol}, graph format "
            f"{request.graph_format}), the coordinator {__version__} (protocol {PROTOCOL_VERSION}, graph format "
            f"{FORMAT_VERSION}); update the older one"
        )


class Members:
    """The providers of a swarm. All methods belong to the network's loop."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.pairs = PairAnswers()
        self.changes = Changes()

    def __getitem__(self, node_id: str) -> Member:
        """PeerError for a node that has not joined since this coordinator began to listen."""
        member = self._members.get(node_id)
        if member is None:
            raise PeerError(f"{node_id} has not joined this coordinator yet; join again")
        return member

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._members

    def put(self, member: Member) -> None:
        """A provider has joined; one that returns takes the place of what it was before."""
        self._members[member.node_id] = member

    def remove(self, node_id: str) -> None:
        self._members.pop(node_id, None)
        self.changes.notify()

    def node_ids(self) -> list[str]:
        return list(self._members)

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
        return [m for m in self._members.values() if m.connected]

    def is_connected(self, node_id: str) -> bool:
        return node_id in self._members and self._members[node_id].connected
