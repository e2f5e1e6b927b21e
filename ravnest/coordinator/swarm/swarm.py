"""Coordinator's side of the swarm: it admits providers, serves artifacts, and passes on messages and frames.

It decides nothing about training and does not judge whether a provider is well: the run does, as its `SwarmEvents`. It
ends the session of a provider that breaks a rule, or that has had no connection for too long.
"""

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ravnest import __version__
from ravnest.background import BackgroundTasks
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.join_rate import DEFAULT_RATE, JoinPace, Rate
from ravnest.coordinator.access.swarm_store import SwarmState
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.event_quota import EventQuota
from ravnest.coordinator.swarm.heartbeat import HEARTBEAT_SECONDS, RECONNECT_SECONDS
from ravnest.coordinator.swarm.link_measurements import hear
from ravnest.coordinator.swarm.members import Member, Members, check_machine, check_version
from ravnest.coordinator.swarm.own_line import OwnLine, receiver_limit
from ravnest.coordinator.swarm.reachability import Reach, find_reach
from ravnest.coordinator.swarm.relay import Relay
from ravnest.errors import PeerError, RefusedError, printable
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.address import split_address
from ravnest.net.door.budgets import origin_of
from ravnest.net.door.doorkeeper import TurnedAway
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import Identity
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.state_rate import StateKind
from ravnest.net.probe.reverse_dial import NONCE_BYTES, dial_back
from ravnest.net.rpc.server import CoordinatorServer
from ravnest.net.streams.frame_stream import Link, RelayEnd
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import (
    CheckReply,
    CheckRequest,
    CoordinatorMessage,
    Deploy,
    JoinReply,
    JoinRequest,
    Meet,
    ProviderMessage,
    Stop,
)
from ravnest.net.version import PROTOCOL_VERSION

STOP_SECONDS = 1.0


class SwarmEvents(Protocol):
    """Callbacks of a run. All calls come on the network's loop."""

    def joined(self, member: Member) -> None:
        """A provider has been admitted."""

    def said(self, node_id: str, message: ProviderMessage) -> None:
        """A provider reports, is ready, has failed or leaves."""

    def returned(self, node_id: str, frame: Frame) -> None:
        """A stage has sent a result or finished a microbatch."""

    def disconnected(self, node_id: str, reason: str) -> None:
        """A provider's connection is down; the provider may connect again."""

    def reconnected(self, node_id: str) -> None:
        """A provider is connected again, with nothing lost."""

    def vanished(self, node_id: str, reason: str) -> None:
        """A provider's session has ended, in order or not."""

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """A stage uploads its state."""

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        """Connections of an address took more than their share of the port and were closed. Rate-limited."""


@dataclass(frozen=True, slots=True)
class SwarmLimits:
    """Limits of a swarm; the defaults suit every swarm."""

    reconnect_seconds: float = RECONNECT_SECONDS
    """Timeout for a provider without a connection, after which its session ends."""
    join_rate: Rate = DEFAULT_RATE
    """Rate of new nodes, per invite and per address."""


DEFAULT_LIMITS: Final = SwarmLimits()


class Swarm:
    """A server and its members. Made and used on the network's loop."""

    def __init__(self, admission: Admission, *, most: int | None = None, limits: SwarmLimits = DEFAULT_LIMITS) -> None:
        """`admission` decides which providers may join; it is closed when the swarm stops."""
        self.admission = admission
        self.most = most
        """Maximum number of providers, without lost ones; None if any provider with an invite may join."""
        self.events: SwarmEvents | None = None
        """The run that the swarm serves; None between runs."""
        self.state: SwarmState | None = None
        """Store for a restarted coordinator; None if the swarm ends with its process."""
        self.generation = 0
        """Number of the current deployment; frames of earlier ones are dropped."""
        self.host = ""
        """The host on which the coordinator listens; providers on it share its cores."""
        self._reconnect_seconds = limits.reconnect_seconds
        self._server = CoordinatorServer(self, admission.server_keys, admission.caller, self._turned_away)
        self.members = Members()
        self.artifacts: dict[str, Artifact] = {}
        self._numbers = 0
        self._process = secrets.token_hex(16)
        self._pace = JoinPace(limits.join_rate)
        self._refusals: defaultdict[str, EventQuota] = defaultdict(EventQuota)
        """Rate limit for events about joins that were refused, by address."""
        # The providers of an embedded swarm are on this machine.
        self.waits_for_all = True
        """Whether a run waits for as many providers as it asks for; otherwise that is only a wish."""
        self.line = OwnLine(StateBudget() if most is None else StateBudget.unlimited())
        """The coordinator's own line."""
        self._relay = Relay(self._call_to_relay, self.line.budget)
        self._tasks = BackgroundTasks()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens, and returns the port, which the system chooses for port 0. RunError when the port is taken."""
        self.host = host
        return await self._server.start(host, port)

    async def stop(self, reason: str) -> None:
        """Tells every provider to stop, gives them a moment to leave, and stops listening."""
        for member in self.members.listening():
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.tell(member.node_id, CoordinatorMessage(stop=Stop(reason=reason)))
        await self.members.wait_until_gone(STOP_SECONDS)
        await self._tasks.close()
        await self._server.stop()
        self.admission.close()

    def expel(self, node_id: str, reason: str = "") -> None:
        """Ends the session of a node that was kicked."""
        because = f" ({reason})" if reason else ""
        why = f"{node_id} was thrown out of the swarm{because}; ask the requester for a new invite"
        self.members.remove(node_id, why)
        self._server.drop(node_id, why)

    def dismiss(self, node_id: str, error: RefusedError) -> None:
        """Ends the session of a node, which is told why and may join again."""
        if node_id in self.members:
            self.members[node_id].fail(error)
        self._server.drop(node_id, str(error))

    @property
    def open_to_more(self) -> bool:
        """Whether another provider may join and replace a lost one."""
        return self.most is None

    def next_number(self) -> int:
        """A number that was not used before, for unique names."""
        self._numbers += 1
        return self._numbers

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        """Sends a message to a provider, now or when it is connected again; PeerError when it is gone."""
        member = self.members[node_id]
        if message.HasField("deploy"):
            # The provider fetches and builds the stage now, and reports when that is done.
            member.order, member.reports = message.deploy, False
        elif message.HasField("hold"):
            member.holds[message.hold.key] = message.hold
        await member.control.send(message)

    async def feed_frame(self, node_id: str, frame: Frame) -> None:
        """Sends a frame to a stage, waiting while it is slow; PeerError when it is gone."""
        await self.members[node_id].feed.send(frame)

    async def reaches(self, members: Sequence[Member]) -> dict[str, Reach]:
        """The reachability of these providers; waits while it is being tested."""
        links = [(member, member.control.link) for member in members]
        await self.members.changes.until(lambda: all(member.reach is not None or link.over for member, link in links))
        gone = Reach("", "it has gone")
        return {member.node_id: member.reach or gone for member in members}

    async def join(self, identity: Identity, request: JoinRequest, seen_host: str) -> JoinReply:
        # First, so that a provider that cannot take part does not use up the invite.
        check_version(request)
        check_machine(request)
        if request.address:
            split_address(request.address)
        await self._keep_pace(identity, request, seen_host)
        admitted = await asyncio.to_thread(self.admission.join, identity, request.certificate_request, request.name)
        member = Member.of(admitted.node_id, request, seen_host)
        member.feed.foreground = self.line.foreground(seen_host)
        member.control.link.foreground = self.line.budget.control
        if member.node_id in self.members:
            self._server.drop(member.node_id, f"{member.node_id} has joined again, over another connection")
        self.members.put(member)
        for work in (self._listen(member), self._take_frames(member), self._keep_reachable(member)):
            self._tasks.spawn(work)
        return JoinReply(
            node_id=member.node_id,
            certificate=admitted.certificate,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            session=member.session,
            process=self._process,
        )

    async def _keep_pace(self, identity: Identity, request: JoinRequest, seen_host: str) -> None:
        """Rate limit for new nodes: delays the join; PeerError if it would take too long."""
        if self.most is not None or not await asyncio.to_thread(
            self.admission.is_new, identity, request.certificate_request
        ):
            return
        address = f"address {origin_of(seen_host)}"
        wait_seconds, why = self._pace.take(f"invite {identity.name}", address, time.monotonic())
        if wait_seconds is None:
            if self.events is not None and self._refusals[address].take(time.monotonic()):
                self.events.turned_away(origin_of(seen_host), 1, why)
            raise PeerError(why)
        await asyncio.sleep(wait_seconds)

    async def check(self, identity: Identity, request: CheckRequest, seen_host: str) -> CheckReply:
        good, reason = await asyncio.to_thread(self.admission.check, identity)
        dialled = good and 0 < request.port < 65536 and len(request.nonce) == NONCE_BYTES and bool(seen_host)
        return CheckReply(
            good=good,
            reason=reason,
            dialled=dialled,
            not_reached=await dial_back(seen_host, request.port, request.nonce) if dialled else "",
            seen_host=seen_host,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            graph_format=FORMAT_VERSION,
            unix_seconds=time.time(),
        )

    async def control(self, node_id: str, connection: Link) -> None:
        member = self.members.staying(node_id, connection.label)
        await self._carry(member, member.control.link, connection)

    async def feed(self, node_id: str, connection: Link) -> None:
        member = self.members.staying(node_id, connection.label)
        await self._carry(member, member.feed, connection)

    async def relay(self, node_id: str, end: RelayEnd) -> None:
        await self._relay.serve(node_id, end)

    def allow_relays(self, links: Mapping[str, frozenset[str]], state: Mapping[str, StateKind] | None = None) -> None:
        """Replaces the links that may be relayed, by name, each with its two nodes; `state`: the kind of state that
        some of them carry."""
        self._relay.allow(links, state)

    async def _carry(self, member: Member, link: ResumableLink, connection: Link) -> None:
        """Carries one of a member's links over this connection, and reports when the connection is lost or back."""
        again, was_present = link.connections > 0, member.present
        carrying = asyncio.create_task(link.carry(connection))
        connected = asyncio.create_task(link.until_connected())
        try:
            await asyncio.wait({carrying, connected}, return_when=asyncio.FIRST_COMPLETED)
            self._greet(member)
            self.members.changes.notify()
            if link.connected and again and was_present and self.events is not None:
                self.events.reconnected(member.node_id)
            await carrying
        except PeerError as error:
            if member.present and not link.connected and self.events is not None:
                self.events.disconnected(member.node_id, str(error))
            self.members.changes.notify()
            raise
        finally:
            carrying.cancel()
            connected.cancel()
            await asyncio.gather(carrying, connected, return_exceptions=True)

    async def _listen(self, member: Member) -> None:
        """Passes on the messages of a provider, until its session is over."""
        reason, left = "it ended its connection", ""
        try:
            while (message := await member.control.receive()) is not None:
                member.message_at = time.monotonic()
                self._note_reporting(member, message)
                if self._take_measurement(member, message):
                    continue
                if message.HasField("leaving"):
                    left = printable(f"it left: {message.leaving.reason}")
                if self.events is not None:
                    self.events.said(member.node_id, message)
        except PeerError as error:
            reason = str(error)
        finally:
            member.fail(PeerError(f"{member.node_id} is gone"))
            if self.events is not None:
                self.events.vanished(member.node_id, left or reason)
            self.members.changes.notify()

    def _note_reporting(self, member: Member, message: ProviderMessage) -> None:
        """A stage reports until it fails. Messages about an earlier order do not count."""
        order = member.order
        for kind in ("report", "failed"):
            if order is not None and message.HasField(kind) and getattr(message, kind).deployment == order.deployment:
                member.reports = kind == "report"

    def _take_measurement(self, member: Member, message: ProviderMessage) -> bool:
        heard = hear(self.members, member, message)
        if message.HasField("measured") and (speed := member.link.speed) is not None:
            self.line.measured(member.seen_host or member.host, speed.up_bytes_per_second, speed.down_bytes_per_second)
        self._greet(member)
        return heard

    def _greet(self, member: Member) -> None:
        """Reports a new provider to the run, once it is connected and its connection is measured."""
        if member.present and not member.greeted:
            member.greeted = True
            if self.events is not None:
                self.events.joined(member)

    async def _take_frames(self, member: Member) -> None:
        """Passes on the frames of a stage, until its session is over. A frame that breaks a rule ends the session."""
        node_id = member.node_id
        try:
            while (frame := await member.feed.receive()) is not None:
                order = member.order
                if order is not None and frame.generation < order.generation:
                    # A frame of an earlier deployment, sent before the new order arrived.
                    continue
                allowed, reason = may_return(node_id, order, frame)
                if not allowed:
                    raise RefusedError(reason)
                if self.events is not None:
                    self.events.returned(node_id, frame)
            # A provider that leaves announces it on its control link, and then both are over.
            raise RefusedError(f"{node_id} ended its feed in the middle of its session")
        except PeerError as error:
            member.fail(error)
            if isinstance(error, RefusedError) and self.members.is_current(member):
                self._server.drop(node_id, str(error))

    async def _keep_reachable(self, member: Member) -> None:
        """Tests whether the provider can be dialled, and ends its session when it does not reconnect in time."""
        link = member.control.link
        patience = asyncio.create_task(link.fail_when_gone(self._reconnect_seconds))
        try:
            with contextlib.suppress(PeerError):
                await link.until_connected()
                authority = self.admission.authority.certificate
                member.reach = await find_reach(member.node_id, member.address, member.seen_host, authority)
                self.members.changes.notify()
            await patience
        finally:
            patience.cancel()

    def _turned_away(self, turned_away: TurnedAway) -> None:
        if self.events is not None:
            self.events.turned_away(turned_away.address, turned_away.connections, str(turned_away))

    async def _call_to_relay(self, node_id: str, link: str) -> None:
        await self.tell(node_id, CoordinatorMessage(meet=Meet(link=link)))

    async def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        member = self.members[node_id]
        named = {ref.id for hold in member.holds.values() for ref in (hold.graph, hold.weights)}
        if (order := member.order) is not None:
            named |= {order.graph.id, order.weights.id, order.sources.id}
        found = self.artifacts.get(artifact)
        if found is None or artifact not in named:
            raise RefusedError(f"there is no artifact {artifact!r} for {node_id} here")
        if offset > found.size_bytes:
            raise RefusedError(f"the artifact {artifact!r} has {found.size_bytes} bytes and no byte {offset}")
        speed = member.link.speed
        transfer = self.line.budget.transfer(
            "artifact",
            urgent=_is_awaited(member, artifact),
            max_bytes_per_second=receiver_limit(None if speed is None else speed.down_bytes_per_second, 1),
        )
        for chunk in found.open(offset):
            async for piece in transfer.pieces(chunk):
                yield piece
                if _is_awaited(member, artifact):
                    transfer.hurry()

    async def upload(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        if self.events is None:
            raise RefusedError("there is no run to upload to")
        with self.members[node_id].uploads.track(name) as upload:
            await self.events.uploaded(node_id, name, upload.counted(chunks))


def _is_awaited(member: Member, artifact: str) -> bool:
    """Whether a cluster stands still until the provider has the artifact. A standby fetches those of a `Hold` ahead."""
    order = member.order
    return order is not None and not member.reports and artifact in (order.graph.id, order.weights.id, order.sources.id)


def may_return(node_id: str, order: Deploy | None, frame: Frame) -> tuple[bool, str]:
    """Whether a node that was given this order may send this frame to the coordinator, and why."""
    if order is None:
        return False, f"{node_id} sent a {frame.kind.name} frame and holds no stage"
    # A root that gets rows from the leaf sends their gradients there.
    is_root, is_leaf = order.stage == 0, order.stage == order.stages - 1
    ends = (is_root and not order.previous.node) or (is_leaf and bool(order.next.node))
    if frame.kind is FrameKind.DONE and ends:
        return True, f"{node_id} holds the stage where a microbatch ends"
    if frame.kind is FrameKind.RESULT and order.stage == order.stages - 1:
        return True, f"{node_id} holds the leaf, which computes the loss"
    return False, f"{node_id} sent a {frame.kind.name} frame, which is not for stage {order.stage} of {order.stages}"
