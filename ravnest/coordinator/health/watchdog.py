"""Watchdog of a run's providers: it tells which are suspected, and drops those that are lost.

It decides nothing itself: it collects evidence for `lease.judge` and `stalls.judge_stall`, and turns their verdicts
into events and losses. Everything runs on the network's loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ravnest.coordinator.health.lease import (
    RETURN_SECONDS,
    UNMEASURED_UPLINK,
    Evidence,
    Lease,
    LeaseVerdict,
    Replacement,
    State,
    Uplink,
    after_a_stop,
    judge,
    late_by,
)
from ravnest.coordinator.health.provider_health import ProviderHealth
from ravnest.coordinator.health.stalls import (
    DEFAULT_TIMEOUTS,
    LinkView,
    StageView,
    StallTimeouts,
    judge_stall,
    longest_after,
)
from ravnest.coordinator.health.uploads import describe_claim, last_progress_at, urgent_rate
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.own_line import receiver_limit
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import RefusedError
from ravnest.net.address import split_address
from ravnest.net.streams.resumable_link import WINDOW_BYTES
from ravnest.net.v1.control_pb2 import Report

_MAX_PAUSE_SECONDS: Final = 0.5
"""Maximum time between two scans: a longer one shows that the coordinator itself was stopped."""
_PROBE_SECONDS: Final = 1.0
_MAX_LINK_BYTES: Final = 2 * WINDOW_BYTES
"""Unconfirmed bytes of one link that are believed: a full window, and one large frame."""


class Emit(Protocol):
    def __call__(self, kind: str, reason: str, **values: object) -> None:
        """Writes an event."""


@dataclass
class _ClusterPace:
    """The pace of a cluster since it last had nothing to do."""

    since: float
    moved_at: float
    longest_seconds: float
    """The longest recent time between two tasks."""


@dataclass
class _Scan:
    """The verdicts of one scan over all providers."""

    now: float
    late_seconds: float
    verdicts: dict[str, LeaseVerdict] = field(default_factory=dict)

    @property
    def is_coordinator_cut_off(self) -> bool:
        """Whether no provider is well: then the coordinator's own line is down."""
        return len(self.verdicts) > 1 and all(verdict.state is not State.WELL for verdict in self.verdicts.values())


class Watchdog:
    """Watches from `run` until that is cancelled.

    - A suspicion is one event `suspected`, and the end of it is one event `reconnected`.
    - A lost provider is handed to `on_lost`, and its session ends: whatever it still sends is refused, and the provider
      joins again once it learns of that.
    - Bytes of an upload are signs of life, and a stage that waits for its upload of the pending checkpoint is busy
      while that makes progress. So is one that loads or swaps, for a while (other_work.py).
    - When no provider at all is heard, or the watchdog itself was stopped, none is lost: all of them get time to
      reconnect.
    """

    def __init__(
        self,
        swarm: Swarm,
        *,
        blocks: Callable[[str], bool],
        replacement: Callable[[str], Replacement],
        emit: Emit,
        on_lost: Callable[[str, str, float], None],
        clusters: Callable[[], Iterable[Sequence[str]]] = tuple,
        stall_timeouts: StallTimeouts = DEFAULT_TIMEOUTS,
        awaited_upload: Callable[[], str] = str,
    ) -> None:
        """`blocks` tells whether other providers wait for this one, and `replacement` what could replace it.

        `clusters` gives the providers of every cluster with something in flight, each in the order of its stages.
        `awaited_upload` gives the name of the upload that a stage may wait for; empty without one.
        `on_lost(node_id, reason, detect_seconds)` is called for a provider that was not heard for this long.
        """
        self._swarm = swarm
        self._blocks = blocks
        self._replacement = replacement
        self._emit = emit
        self._on_lost = on_lost
        self._clusters = clusters
        self._stall_timeouts = stall_timeouts
        self._awaited_upload = awaited_upload
        self._paces: dict[tuple[str, ...], _ClusterPace] = {}
        self._due = 0.0

    async def run(self) -> None:
        """Watches forever."""
        try:
            self._due = time.monotonic()
            while True:
                pause = self._scan(time.monotonic())
                self._due = time.monotonic() + pause
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._connections_change()
        finally:
            watched = [health for _, health in self._watched()]
            probes = [health.probe for health in watched if health.probe is not None]
            for node_id in self._swarm.members.node_ids():
                self._forget(node_id)
            await asyncio.gather(*probes, return_exceptions=True)

    def reported(self, node_id: str, report: Report) -> None:
        """A stage has reported its work and its links."""
        health = self._health(node_id)
        if health is None:
            return
        faults = health.report.page_faults if health.report is not None else report.page_faults
        health.report = report
        counts, now = (report.forwards, report.backwards, report.updates), time.monotonic()
        if counts != health.counts:
            health.counts, health.moved_at = counts, now
            return
        # Only a cluster with work in flight can stall, and only that time has to be excused.
        since = next((pace.since for nodes, pace in self._paces.items() if node_id in nodes), None)
        if since is not None:
            still_seconds = now - max(health.moved_at, since)
            if health.other_work.is_work(report.page_faults - faults, still_seconds, now)[0]:
                health.moved_at = now

    def give_up(self, node_id: str, reason: str) -> None:
        """Drops a provider that is heard and works, because the others are better off without it."""
        self._lose(node_id, reason, 0.0)

    async def _connections_change(self) -> None:
        known = self._broken()
        await self._swarm.members.changes.until(lambda: self._broken() != known)

    def _scan(self, now: float) -> float:
        """Judges all providers; the time until the next scan."""
        scan = _Scan(now, late_by(self._due, now))
        members = self._swarm.members.connected()
        for node_id, _ in self._watched():
            if not self._swarm.members.is_present(node_id):
                self._forget(node_id)
        for member in members:
            health = self._update(member, scan)
            scan.verdicts[member.node_id] = judge(self._evidence(member, health, now))
        if scan.is_coordinator_cut_off:
            for _, health in self._watched():
                health.lease = health.lease.renewed(now, RETURN_SECONDS)
        for member in members:
            self._act(member, scan)
        self._scan_clusters(scan)
        soon = [verdict.look_again_seconds for verdict in scan.verdicts.values() if verdict.state is not State.LOST]
        return min([_MAX_PAUSE_SECONDS, *soon])

    def _update(self, member: Member, scan: _Scan) -> ProviderHealth:
        links = (member.control.link, member.feed)
        uploaded_at = member.uploads.heard_at
        health = member.health
        if health is None:
            health = member.health = ProviderHealth(Lease(scan.now, reported_at=scan.now), moved_at=scan.now)
        elif scan.late_seconds:
            health.lease = after_a_stop(health.lease, scan.late_seconds, scan.now)
        self._note_uploads(member, health, scan.now)
        broken = [link.broken_at for link in links if link.broken_at is not None]
        health.lease = health.lease.seen(
            max(*(link.last_received_at for link in links), uploaded_at),
            min(broken, default=None),
            max(member.message_at, uploaded_at),
        )
        if not broken:
            health.refuses = False
        elif not health.refuses and (health.probe is None or health.probe.done()):
            address = "" if member.reach is None else member.reach.address
            health.probe = asyncio.create_task(self._probe(address, health)) if address else None
        return health

    def _note_uploads(self, member: Member, health: ProviderHealth, now: float) -> None:
        """A stage that waits for the upload of its state is busy as long as the upload makes progress."""
        health.claim = ""
        if health.report is None or health.report.activity.kind != "save":
            return
        members, name = self._swarm.members, self._awaited_upload()
        senders = sum(other.uploads.named(name) is not None for other in members.connected())
        receiver_rate = receiver_limit(self._swarm.line.down_bytes_per_second, senders)
        rate = urgent_rate(members.line_rate(member.node_id) or 0.0, receiver_rate)
        health.moved_at = max(health.moved_at, last_progress_at(member.uploads, name, rate, now) or 0.0)
        claims = [claim for claim in health.report.transfers if claim.kind == "checkpoint"]
        if claims:
            health.claim = describe_claim(claims[0], member.uploads, rate, now)

    def _evidence(self, member: Member, health: ProviderHealth, now: float) -> Evidence:
        speed, lease = member.link.speed, health.lease
        blocks = self._blocks(member.node_id)
        return Evidence(
            lease.silent_seconds(now),
            lease.broken_seconds(now),
            lease.gaps,
            UNMEASURED_UPLINK if speed is None else Uplink(speed.round_trip_seconds, speed.up_bytes_per_second),
            blocks,
            self._replacement(member.node_id) if blocks else "none",
            self._complaints(member.node_id),
            health.refuses,
            building=blocks and not member.reports,
            spared_seconds=lease.spared_seconds(now),
            unreported_seconds=lease.unreported_seconds(now) if member.reports else 0.0,
        )

    def _complaints(self, about: str) -> tuple[str, ...]:
        """The providers that are well and have lost their connection to this one."""
        return tuple(
            node_id
            for node_id, health in self._watched()
            if health.report is not None and health.state is State.WELL and node_id != about
            if any(link.node == about and link.connections and not link.route for link in health.report.links)
        )

    def _act(self, member: Member, scan: _Scan) -> None:
        node_id, health = member.node_id, member.health
        assert health is not None
        verdict = scan.verdicts[node_id]
        if verdict.state is State.LOST and not scan.is_coordinator_cut_off:
            self._lose(node_id, verdict.reason, health.lease.silent_seconds(scan.now))
        elif verdict.state is State.WELL:
            # The swarm emits the event for a new connection.
            if health.state is not State.WELL and health.connections == member.control.link.connections:
                self._emit("reconnected", f"{node_id} is heard again", provider=node_id)
            health.state = State.WELL
        elif health.state is State.WELL:
            health.state, health.connections = State.SUSPECTED, member.control.link.connections
            self._emit("suspected", verdict.reason, provider=node_id)

    def _scan_clusters(self, scan: _Scan) -> None:
        clusters = [tuple(nodes) for nodes in self._clusters()]
        before, self._paces = self._paces, {}
        for nodes in clusters:
            stages = [health for health in map(self._health, nodes) if health is not None]
            if len(stages) < len(nodes) or any(health.report is None for health in stages):
                continue
            moved_at = max(health.moved_at for health in stages)
            pace = before.get(nodes)
            if pace is None or scan.late_seconds:
                longest_seconds = self._stall_timeouts.first_task_seconds if pace is None else pace.longest_seconds
                pace = _ClusterPace(scan.now, moved_at, longest_seconds)
            if moved_at > pace.moved_at:
                gap = moved_at - max(pace.moved_at, pace.since)
                pace.longest_seconds, pace.moved_at = longest_after(pace.longest_seconds, gap), moved_at
            self._paces[nodes] = pace
            if all(health.state is State.WELL for health in stages):
                self._judge_cluster(nodes, stages, pace, scan.now)

    def _judge_cluster(
        self, nodes: Sequence[str], healths: Sequence[ProviderHealth], pace: _ClusterPace, now: float
    ) -> None:
        stages = [
            self._stage_view(node_id, health, now - max(health.moved_at, pace.since))
            for node_id, health in zip(nodes, healths, strict=True)
        ]
        stall = judge_stall(stages, pace.longest_seconds, self._replacement, self._stall_timeouts)
        for node_id, health in zip(nodes, healths, strict=True):
            if stall is None or stall.node_id != node_id:
                if health.stalls:
                    self._emit("reconnected", f"{node_id} does not block its cluster any more", provider=node_id)
                health.stalls = False
            elif not health.stalls:
                health.stalls = True
                self._emit("suspected", stall.reason, provider=node_id)
        if stall is not None and stall.is_over:
            self._lose(stall.node_id, stall.reason, min(stage.still_seconds for stage in stages))

    def _lose(self, node_id: str, reason: str, detect_seconds: float) -> None:
        self._forget(node_id)
        self._on_lost(node_id, reason, detect_seconds)
        why = f"{node_id} was given up: {reason}; other providers have taken over its work, and it may join again"
        self._swarm.dismiss(node_id, RefusedError(why))

    def _forget(self, node_id: str) -> None:
        if node_id not in self._swarm.members:
            return
        member = self._swarm.members[node_id]
        if member.health is not None and member.health.probe is not None:
            member.health.probe.cancel()
        member.health = None

    def _health(self, node_id: str) -> ProviderHealth | None:
        return self._swarm.members[node_id].health if node_id in self._swarm.members else None

    def _watched(self) -> list[tuple[str, ProviderHealth]]:
        """The providers under watch, by name."""
        known = ((node_id, self._health(node_id)) for node_id in self._swarm.members.node_ids())
        return [(node_id, health) for node_id, health in known if health is not None]

    def _stage_view(self, node_id: str, health: ProviderHealth, still_seconds: float) -> StageView:
        assert health.report is not None
        links = (
            LinkView(
                link.node,
                bool(link.route) or not link.connections,
                link.unconfirmed,
                self._line_seconds(node_id, link.node, link.unconfirmed_bytes),
            )
            for link in health.report.links
        )
        return StageView(node_id, max(0.0, still_seconds), health.report.ready, tuple(links), health.claim)

    def _line_seconds(self, sender: str, receiver: str, size_bytes: int) -> float:
        """Time that the lines of two providers need for these bytes; 0 if none was measured. A provider may say
        anything, but a link keeps no more than its window."""
        members = self._swarm.members
        rates = [rate for rate in (members.line_rate(sender), members.down_rate(receiver)) if rate]
        return min(size_bytes, _MAX_LINK_BYTES) / min(rates) if rates else 0.0

    async def _probe(self, address: str, health: ProviderHealth) -> None:
        """Dials a provider without a connection, to learn whether its address refuses connections."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(*split_address(address))
            writer.transport.abort()
            # A rate limit for the probes of an address that accepts connections.
            await asyncio.sleep(_PROBE_SECONDS)
        except ConnectionRefusedError:
            health.refuses = True
            self._swarm.members.changes.notify()
        except (OSError, TimeoutError):
            return

    def _broken(self) -> frozenset[tuple[str, bool]]:
        """The sessions without a connection, and whether their provider's address refuses connections."""
        return frozenset(
            (member.session, member.health is not None and member.health.refuses)
            for member in self._swarm.members.connected()
            if member.control.link.broken_at is not None or member.feed.broken_at is not None
        )
