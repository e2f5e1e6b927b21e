"""Membership: who has joined the swarm, and over which links it is spoken with."""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Self

from ravnest import __version__
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.link_measurements import PairAnswers, positive
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.upload_activity import Uploads
from ravnest.engine.speed.device_speed import Speed
from ravnest.errors import PeerError, RefusedError, printable
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, HeldStage, JoinRequest, ProviderMessage
from ravnest.net.v1.control_pb2 import Speed as SpeedMessage
from ravnest.net.version import PROTOCOL_VERSION

_NAME_CHARACTERS = 80
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """A stage that a provider has from before its coordinator was started again."""

    deployment: str
    stage: int
    stages: int

    @classmethod
    def of(cls, held: HeldStage) -> Self:
        return cls(printable(held.deployment[:_NAME_CHARACTERS]), held.stage, held.stages)


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
    reports: bool = False
    """Whether it holds a stage and has begun to report on it."""
    greeted: bool = False
    """Whether it has been told that this one is here."""

    cores: int = 0
    flops_per_second: float = 0.0
    """As it measured itself; 0 where it did not, as in the embedded swarm, where all machines are one."""
    bfloat16_flops_per_second: float = 0.0
    float16_flops_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0
    slower: float = 1.0
    """It computes so many times slower than its machine could. A speed that it measured is told as if it had to."""
    stage_seconds: float = 0.0
    """It pretends that any stage takes it so long, forward and backward; 0 where it does not."""
    direct_port: int = 0
    """Where it listens for direct lines, at the host of its address; 0 when it does not."""
    parts: frozenset[tuple[str, int]] = frozenset()
    """Of replicas that it has kept, by key and number."""
    held: Held | None = None
    """The stage that it has of a coordinator that was before this one."""
    uploads: Uploads = field(default_factory=Uploads)
    """What it uploads at the moment, as the coordinator sees it."""
    device_name: str = ""
    measures_link: bool = False
    """Whether it measures its connection: it is present once it has said what it found."""
    link: LinkSpeed | None = None
    """Its connection to the coordinator, as it measured it."""
    link_error: str = ""
    """Why it could not."""

    @classmethod
    def of(cls, node_id: str, request: JoinRequest, seen_host: str) -> Self:
        """The provider that this request has let in."""
        return cls(
            node_id,
            request.address,
            printable(request.device[:_NAME_CHARACTERS]),
            request.memory_bytes,
            request.threads,
            seen_host,
            cores=request.cores,
            flops_per_second=positive(request.flops_per_second),
            bfloat16_flops_per_second=positive(request.bfloat16_flops_per_second),
            float16_flops_per_second=positive(request.float16_flops_per_second),
            memory_bytes_per_second=positive(request.memory_bytes_per_second),
            slower=max(1.0, positive(request.slower)),
            stage_seconds=positive(request.stage_seconds),
            direct_port=request.direct_port if request.direct_port < 65536 else 0,
            device_name=printable(request.device_name[:_NAME_CHARACTERS]),
            measures_link=request.measures_link,
            parts=frozenset((part.key, part.replica) for part in request.parts[:_MAX_PARTS]),
            held=Held.of(request.held) if request.HasField("held") else None,
        )

    def shares_again(self, speed: SpeedMessage) -> None:
        """It computes with another share of its machine's cores; plans are made with that from now on."""
        self.threads = min(max(1, speed.threads), _MAX_THREADS)
        self.cores = min(speed.cores, _MAX_THREADS)
        self.flops_per_second = positive(speed.flops_per_second)
        self.memory_bytes_per_second = positive(speed.memory_bytes_per_second)
        self.bfloat16_flops_per_second = positive(speed.bfloat16_flops_per_second)
        self.float16_flops_per_second = positive(speed.float16_flops_per_second)

    def __post_init__(self) -> None:
        self.feed = ResumableLink(self.node_id)
        self.control: ControlLink[CoordinatorMessage, ProviderMessage] = ControlLink(
            ResumableLink(self.node_id), ProviderMessage
        )

    @property
    def speed(self) -> Speed:
        """How fast it measured itself to be; zeros where it did not."""
        return Speed(
            self.flops_per_second,
            self.memory_bytes_per_second,
            self.bfloat16_flops_per_second,
            self.float16_flops_per_second,
        )

    @property
    def host(self) -> str:
        """The machine it is on."""
        return self.address.rpartition(":")[0] or self.seen_host

    @property
    def present(self) -> bool:
        """Whether both of its links have been there, and are not over, and what it measures is known.

        One that is down for a moment is not over.
        """
        return self.measured and all(link.connections and not link.over for link in (self.control.link, self.feed))

    @property
    def measured(self) -> bool:
        """Whether it has said how its connection is, or does not measure it."""
        return not self.measures_link or self.link is not None or bool(self.link_error)

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
    if request.memory_bytes > _MAX_MEMORY_BYTES or request.threads > _MAX_THREADS:
        raise RefusedError(
            f"this provider says that it lends {request.memory_bytes} bytes of memory and {request.threads} threads; "
            f"at most {_MAX_MEMORY_BYTES} and {_MAX_THREADS} are believed, say how much with --memory"
        )


_MAX_MEMORY_BYTES = 1 << 50
_MAX_THREADS = 1 << 16


class Members:
    """The providers of a swarm. All methods belong to the network's loop."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.pairs = PairAnswers()
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

    def line_rate(self, node_id: str) -> float | None:
        """Bytes a second that this one can send, as it measured its connection; None where that is not known."""
        link = self._members[node_id].link if node_id in self._members else None
        return None if link is None else link.up_bytes_per_second

    def node_ids(self) -> list[str]:
        return list(self._members)

    async def wait_for(self, count: int) -> list[Member]:
        """The first `count` members that are connected, by name; waits until there are as many."""
        await self.changes.until(lambda: len(self.connected()) >= count)
        return self.in_order()[:count]

    def in_order(self) -> list[Member]:
        """Those that are connected, in the order in which they get stages: by name."""
        return sorted(self.connected(), key=lambda m: (len(m.node_id), m.node_id))

    async def wait_until_gone(self, timeout_seconds: float) -> None:
        """Until the stay of every member is over, or the time is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.changes.until(lambda: not self.listening())

    def listening(self) -> list[Member]:
        """Those that can be told something, also before it is known what they measured."""
        links = ((member, member.control.link) for member in self._members.values())
        return [member for member, link in links if link.connections and not link.over]

    def connected(self) -> list[Member]:
        """Those that are here: present and, once there are links, not given up."""
        return [m for m in self._members.values() if m.present]
