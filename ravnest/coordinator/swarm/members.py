"""Members of the swarm: the sessions of the providers that have joined, and the coordinator's links to them."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from ravnest import __version__
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.link_measurements import PairAnswers, positive
from ravnest.coordinator.swarm.presence import Presence
from ravnest.coordinator.swarm.provider_record import ProviderRecord, ProviderRecords
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.uploads import Uploads
from ravnest.engine.speed.device_speed import Speed
from ravnest.errors import PeerError, RefusedError, printable
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, HeldStage, Hold, JoinRequest, ProviderMessage
from ravnest.net.v1.control_pb2 import Speed as SpeedMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.planner.reliability import Attendance, Reliability, estimate_reliability

if TYPE_CHECKING:
    from ravnest.coordinator.health.provider_health import ProviderHealth

_NAME_CHARACTERS = 80
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """A stage that a provider has held since before the coordinator restarted."""

    deployment: str
    stage: int
    stages: int

    @classmethod
    def of(cls, held: HeldStage) -> Self:
        return cls(printable(held.deployment[:_NAME_CHARACTERS]), held.stage, held.stages)


@dataclass
class LentMachine:
    """The machine that a provider lends, as the provider describes it."""

    device: str
    memory_bytes: int
    threads: int = 0
    """Threads that the provider computes with; 0 where the coordinator chooses the number."""
    cores: int = 0
    device_name: str = ""
    speed: Speed = field(default_factory=lambda: Speed(0.0, 0.0))
    """Measured by the provider; zeros where it did not measure, as in the embedded swarm, where all providers share one
    machine."""
    slower: float = 1.0
    """The provider computes this many times slower than its machine could. A measured speed includes it already."""
    stage_seconds: float = 0.0
    """The provider stretches forward plus backward of any stage to this time; 0 where it does not."""

    @classmethod
    def of(cls, request: JoinRequest) -> Self:
        return cls(
            device=printable(request.device[:_NAME_CHARACTERS]),
            memory_bytes=request.memory_bytes,
            threads=request.threads,
            cores=request.cores,
            device_name=printable(request.device_name[:_NAME_CHARACTERS]),
            speed=_speed_of(request),
            slower=max(1.0, positive(request.slower)),
            stage_seconds=positive(request.stage_seconds),
        )

    def change_share(self, said: SpeedMessage) -> None:
        """The provider computes with another share of its machine's cores; later plans use the new speed."""
        self.threads = min(max(1, said.threads), _MAX_THREADS)
        self.cores = min(said.cores, _MAX_THREADS)
        self.speed = _speed_of(said)


@dataclass
class LinkMeasurement:
    """Measurement of a provider's connection to the coordinator, made by the provider."""

    is_expected: bool = False
    """Whether the provider measures its connection: it counts as present once its result is here."""
    speed: LinkSpeed | None = None
    error: str = ""
    """Why the provider could not measure it."""

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or the provider does not measure."""
        return not self.is_expected or self.speed is not None or bool(self.error)


@dataclass
class Member:
    """One session of one provider; a provider that joins again gets a new one.

    Everything that outlives a session is in the provider's `ProviderRecord`.
    """

    node_id: str
    address: str
    """The address on which the provider says that it listens; empty when it does not listen."""
    machine: LentMachine
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    seen_host: str = ""
    """The host from which its connections come."""
    reach: Reach | None = None
    """Whether the provider can be dialled, once that is known."""
    direct_port: int = 0
    """The port for direct lines, at the host of its address; 0 when it does not listen there."""
    link: LinkMeasurement = field(default_factory=LinkMeasurement)
    greeted: bool = False
    """Whether the run has been told of this session."""

    held: Held | None = None
    """The stage that the provider holds from the coordinator before this one."""
    parts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """Parts of replicas that the provider has kept: by key and number, how their sha256 begins; empty if unknown."""
    order: Deploy | None = None
    """The newest order: the artifacts that the provider may fetch and the frames that it may send follow from it."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """Replicas that the provider is to keep, by the stage's key: it may fetch their artifacts."""
    reports: bool = False
    """Whether the provider holds a stage and has begun to report on it."""
    message_at: float = 0.0
    """When the provider last sent a control message, on the clock `time.monotonic`."""
    uploads: Uploads = field(default_factory=Uploads)
    """Uploads of its state that are under way."""
    health: "ProviderHealth | None" = None
    """The failure detector's view, while a run watches the provider."""

    def __post_init__(self) -> None:
        self.feed = ResumableLink(self.node_id)
        self.control: ControlLink[CoordinatorMessage, ProviderMessage] = ControlLink(
            ResumableLink(self.node_id), ProviderMessage
        )

    @classmethod
    def of(cls, node_id: str, request: JoinRequest, seen_host: str) -> Self:
        """The session that begins with this request."""
        return cls(
            node_id,
            request.address,
            LentMachine.of(request),
            seen_host=seen_host,
            direct_port=request.direct_port if request.direct_port < 65536 else 0,
            link=LinkMeasurement(request.measures_link),
            parts={(part.key, part.replica): part.sha256_start[:32].hex() for part in request.parts[:_MAX_PARTS]},
            held=Held.of(request.held) if request.HasField("held") else None,
        )

    @property
    def host(self) -> str:
        """The host of the provider's machine."""
        return self.address.rpartition(":")[0] or self.seen_host

    @property
    def present(self) -> bool:
        """Whether both links have been connected and are not over, and the measurement of its connection is here.

        A link that is down for a moment is not over.
        """
        links = self.control.link, self.feed
        return self.link.is_done and all(link.connections and not link.over for link in links)

    def fail(self, error: PeerError) -> None:
        """Ends the session."""
        self.control.link.fail(error)
        self.feed.fail(error)


def _speed_of(said: JoinRequest | SpeedMessage) -> Speed:
    return Speed(
        positive(said.flops_per_second),
        positive(said.memory_bytes_per_second),
        positive(said.bfloat16_flops_per_second),
        positive(said.float16_flops_per_second),
    )


def check_version(request: JoinRequest) -> None:
    """RefusedError for a provider with another protocol or graph format."""
    if request.protocol != PROTOCOL_VERSION or request.graph_format != FORMAT_VERSION:
        raise RefusedError(
            f"this provider runs Ravnest {request.version} (protocol {request.protocol}, graph format "
            f"{request.graph_format}), the coordinator {__version__} (protocol {PROTOCOL_VERSION}, graph format "
            f"{FORMAT_VERSION}); update the older one"
        )


def check_machine(request: JoinRequest) -> None:
    """RefusedError for a machine that reports impossible figures, which would break plans and the store."""
    if request.memory_bytes > _MAX_MEMORY_BYTES or request.threads > _MAX_THREADS:
        raise RefusedError(
            f"this provider reports {request.memory_bytes} bytes of memory and {request.threads} threads, more than "
            f"{_MAX_MEMORY_BYTES} and {_MAX_THREADS}; set the memory with --memory"
        )


_MAX_MEMORY_BYTES = 1 << 50
_MAX_THREADS = 1 << 16


class Members:
    """The providers of a swarm. All methods belong to the network's loop."""

    def __init__(self) -> None:
        self.records = ProviderRecords()
        """The records of all providers; a record outlives the provider's sessions, and ends with the run."""
        self.pairs = PairAnswers()
        self.changes = Changes()

    def __getitem__(self, node_id: str) -> Member:
        """The latest session of a node; RefusedError if it has not joined since this coordinator began to listen."""
        member = self._session(node_id)
        if member is None:
            raise RefusedError(f"{node_id} has not joined this coordinator yet; join again")
        return member

    def __contains__(self, node_id: str) -> bool:
        return self._session(node_id) is not None

    def begin_run(self) -> None:
        """Forgets what a run before has learned of the providers; their stays go on, and their presence is kept."""
        self.records = ProviderRecords(
            (node_id, ProviderRecord(node_id, record.member, presence=record.presence))
            for node_id, record in self.records.items()
        )

    def restore_presence(self, seen: Mapping[str, Attendance]) -> None:
        """Restores the counts that an earlier coordinator has saved."""
        for node_id, attendance in seen.items():
            self.records[node_id].presence = Presence(attendance)

    def attendances(self) -> dict[str, Attendance]:
        """The counts of every provider up to now, by node id."""
        now = time.monotonic()
        return {node_id: record.presence.attendance(now) for node_id, record in self.records.items()}

    def reliability(self, node_id: str) -> Reliability:
        """The reliability of a provider, estimated from its counts."""
        return estimate_reliability(self.records[node_id].presence.attendance(time.monotonic()))

    def staying(self, node_id: str, session: str) -> Member:
        """The member, if this session is still its own; RefusedError otherwise."""
        member = self[node_id]
        if member.session != session or member.control.link.over:
            raise RefusedError(f"this session of {node_id} is over; join again")
        return member

    def is_present(self, node_id: str) -> bool:
        member = self._session(node_id)
        return member is not None and member.present

    def is_current(self, member: Member) -> bool:
        """Whether this is the latest session of the node."""
        return self._session(member.node_id) is member

    def put(self, member: Member) -> None:
        """Adds the session of a provider that has joined, and ends its earlier one."""
        record = self.records[member.node_id]
        before, record.member = record.member, member
        if before is not None:
            before.fail(RefusedError(f"{member.node_id} has joined again, over another connection"))

    def remove(self, node_id: str, why: str) -> None:
        """Ends the session of a provider."""
        member = self._session(node_id)
        if member is not None:
            self.records[node_id].member = None
            member.fail(RefusedError(why))
        self.changes.notify()

    def line_rate(self, node_id: str) -> float | None:
        """Bytes per second of the provider's uplink, as measured; None if unknown."""
        member = self._session(node_id)
        return None if member is None or member.link.speed is None else member.link.speed.up_bytes_per_second

    def down_rate(self, node_id: str) -> float | None:
        """Bytes per second of the provider's downlink, as measured; None if unknown."""
        member = self._session(node_id)
        return None if member is None or member.link.speed is None else member.link.speed.down_bytes_per_second

    @property
    def lost_count(self) -> int:
        """Providers that were given up and have not joined again."""
        return sum(known.is_lost for known in self.records.values())

    def node_ids(self) -> list[str]:
        return [member.node_id for member in self._sessions()]

    async def wait_for(self, count: int) -> list[Member]:
        """The first `count` connected members by name; waits until there are enough."""
        await self.changes.until(lambda: len(self.connected()) >= count)
        return self.in_order()[:count]

    def in_order(self) -> list[Member]:
        """The connected members by name, which is the order in which they get stages."""
        return sorted(self.connected(), key=lambda m: (len(m.node_id), m.node_id))

    async def wait_until_gone(self, timeout_seconds: float) -> None:
        """Waits until all sessions are over, at most for this timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.changes.until(lambda: not self.listening())

    def listening(self) -> list[Member]:
        """The members that receive messages, including those whose connection is not measured yet."""
        links = ((member, member.control.link) for member in self._sessions())
        return [member for member, link in links if link.connections and not link.over]

    def connected(self) -> list[Member]:
        """The members that are present: see `Member.present`."""
        return [member for member in self._sessions() if member.present]

    def _session(self, node_id: str) -> Member | None:
        known = self.records.get(node_id)
        return None if known is None else known.member

    def _sessions(self) -> list[Member]:
        return [known.member for known in self.records.values() if known.member is not None]
