"""Membership: who has joined the swarm, and over which links it is spoken with."""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field

from ravnest import __version__
from ravnest.coordinator.reachability import Reach
from ravnest.coordinator.waiting import Changes
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.control_link import ControlLink
from ravnest.net.resumable import ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION


@dataclass
class Member:
    """One stay of one provider in the swarm."""

    node_id: str
    address: str
    """Where it says that it listens; empty when it does not."""
    device: str
    memory_bytes: int
    threads: int = 0
    """What it computes with on a machine of its own; 0 where that is the coordinator's to say."""
    seen_host: str = ""
    """Where its connections come from."""
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    reach: Reach | None = None
    """Whether it can be dialled, once that is known."""

    def __post_init__(self) -> None:
        self.feed = ResumableLink(self.node_id)
        self.control: ControlLink[CoordinatorMessage, ProviderMessage] = ControlLink(
            ResumableLink(self.node_id), ProviderMessage
        )

    @property
    def host(self) -> str:
        """The machine it is on."""
        return self.address.rpartition(":")[0] or self.seen_host

    @property
    def present(self) -> bool:
        """Whether both of its links have been there, and are not over. One that is down for a moment is not over."""
        return all(link.connections and not link.over for link in (self.control.link, self.feed))

    def fail(self, error: PeerError) -> None:
        """Ends its stay."""
        self.control.link.fail(error)
        self.feed.fail(error)


def check_version(request: JoinRequest) -> None:
    """PeerError for a provider that speaks another protocol or reads another graph format."""
    if request.protocol != PROTOCOL_VERSION or request.graph_format != FORMAT_VERSION:
        raise RefusedError(
            f"this provider runs Ravnest {request.version} (protocol {request.protocol}, graph format "
            f"{request.graph_format}), the coordinator {__version__} (protocol {PROTOCOL_VERSION}, graph format "
            f"{FORMAT_VERSION}); update the older one"
        )


def check_machine(request: JoinRequest) -> None:
    """RefusedError for a machine that says of itself what no machine is: such numbers fit no plan and no store."""
    if request.memory_bytes > _MOST_MEMORY_BYTES or request.threads > _MOST_THREADS:
        raise RefusedError(
            f"this provider says that it lends {request.memory_bytes} bytes of memory and {request.threads} threads; "
            f"at most {_MOST_MEMORY_BYTES} and {_MOST_THREADS} are believed, say how much with --memory"
        )


_MOST_MEMORY_BYTES = 1 << 50
_MOST_THREADS = 1 << 16


class Members:
    """The providers of a swarm. All methods belong to the network's loop."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.changes = Changes()

    def __getitem__(self, node_id: str) -> Member:
        """RefusedError for a node that has not joined since this coordinator began to listen."""
        member = self._members.get(node_id)
        if member is None:
            raise RefusedError(f"{node_id} has not joined this coordinator yet; join again")
        return member

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._members

    def staying(self, node_id: str, session: str) -> Member:
        """The member, if this is still its stay; RefusedError when it is not."""
        member = self[node_id]
        if member.session != session or member.control.link.over:
            raise RefusedError(f"this stay of {node_id} in the swarm is over; join again")
        return member

    def is_present(self, node_id: str) -> bool:
        return node_id in self._members and self._members[node_id].present

    def is_current(self, member: Member) -> bool:
        """Whether this is the newest stay of the node."""
        return self._members.get(member.node_id) is member

    def put(self, member: Member) -> None:
        """A provider has joined; one that returns takes the place of what it was before."""
        before = self._members.get(member.node_id)
        self._members[member.node_id] = member
        if before is not None:
            before.fail(RefusedError(f"{member.node_id} has joined again, over another connection"))

    def remove(self, node_id: str, why: str) -> None:
        member = self._members.pop(node_id, None)
        if member is not None:
            member.fail(RefusedError(why))
        self.changes.notify()

    def node_ids(self) -> list[str]:
        return list(self._members)

    async def wait_for(self, count: int) -> list[Member]:
        """The first `count` members that are connected, ordered by name; waits until there are as many."""
        await self.changes.until(lambda: len(self.connected()) >= count)
        return sorted(self.connected()[:count], key=lambda m: (len(m.node_id), m.node_id))

    async def wait_until_gone(self, timeout_seconds: float) -> None:
        """Until the stay of every member is over, or the time is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.changes.until(lambda: not self.connected())

    def connected(self) -> list[Member]:
        """Those that are here: present and, once there are links, not given up."""
        return [m for m in self._members.values() if m.present]
