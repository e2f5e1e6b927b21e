"""The watch over the providers of a run: hears whether they are there, and says whom the others need not wait for.

It decides nothing itself: what it has seen goes to `leases.judge` and `stalls.judge_stall`, and what they say becomes
an event or a loss. All of it happens on the network's loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ravnest.coordinator.health.lease import (
    RETURN_SECONDS,
    Evidence,
    Lease,
    Replacement,
    State,
    Verdict,
    after_a_stop,
    judge,
    late_by,
)
from ravnest.coordinator.health.provider_health import ProviderHealth
from ravnest.coordinator.health.stalls import LinkView, StageView, judge_stall, longest_after
from ravnest.coordinator.swarm.heartbeat import Uplink
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import RefusedError
from ravnest.net.address import split_address
from ravnest.net.v1.control_pb2 import Report

_LOOK_SECONDS: Final = 0.5
"""It looks at least this often, so that it knows when it was itself stopped."""
_KNOCK_SECONDS: Final = 1.0
_FIRST_PIECE_SECONDS: Final = 15.0
"""How long a stage may take for its first piece of work, before anything is known of it."""


class Emit(Protocol):
    def __call__(self, kind: str, reason: str, **values: object) -> None:
        """Writes an event."""


@dataclass
class _ClusterPace:
    """How a cluster moves, since it last had nothing to do."""

    since: float
    moved_at: float
    longest_seconds: float


@dataclass
class _Scan:
    """What one look has found."""

    now: float
    late_seconds: float
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def nobody_is_well(self) -> bool:
        return len(self.verdicts) > 1 and all(verdict.state is not State.WELL for verdict in self.verdicts.values())


class Watchdog:
    """Watches from `run` until that is cancelled.

    - A provider that is not heard is told of once, as the event `suspected`, and again when it is well.
    - One that is lost is handed to `on_lost`, and its stay is ended: whatever it still sends is refused, and when it is
      told so it joins again.
    - A provider whose state is coming is heard by that, and a stage that uploads its state is at work as long as it
      really comes.
    - When nobody at all is heard, or the watch itself was stopped, it is not the providers that are gone: all of them
      get time to come back.
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
    ) -> None:
        """`blocks` says whether others wait for what this provider does, and `replacement` who could take its place.

        `clusters` gives the providers of every cluster in which something is under way, each in the order of its
        stages. `on_lost(node_id, reason, detect_seconds)` is told whom to do without and for how long it was not heard.
        """
        self._swarm = swarm
        self._blocks = blocks
        self._replacement = replacement
        self._emit = emit
        self._on_lost = on_lost
        self._clusters = clusters
        self._paces: dict[tuple[str, ...], _ClusterPace] = {}
        self._due = 0.0

    async def run(self) -> None:
        """Watches, for ever."""
        try:
            self._due = time.monotonic()
            while True:
                pause = self._look(time.monotonic())
                self._due = time.monotonic() + pause
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._until_something_breaks()
        finally:
            watched = [health for _, health in self._watched()]
            tasks = [health.knocking for health in watched if health.knocking is not None]
            for node_id in self._swarm.members.node_ids():
                self._forget(node_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    def reported(self, node_id: str, report: Report) -> None:
        """A stage has said what it did and how its links are."""
        health = self._health(node_id)
        if health is None:
            return
        health.report = report
        counts = (report.forwards, report.backwards, report.updates)
        if counts != health.counts:
            health.counts, health.moved_at = counts, time.monotonic()

    def is_well(self, node_id: str) -> bool:
        """Whether the provider is here and under no suspicion: whoever is to take a stage should be."""
        health = self._health(node_id)
        if health is None or health.state is not State.WELL or not self._swarm.members.is_present(node_id):
            return False
        member = self._swarm.members[node_id]
        return member.control.link.connected and member.feed.connected

    def give_up(self, node_id: str, reason: str) -> None:
        """Does without this one, which is heard and at work: the others are better off."""
        self._lose(node_id, reason, 0.0)

    async def _until_something_breaks(self) -> None:
        known = self._broken()
        await self._swarm.members.changes.until(lambda: self._broken() != known)

    def _look(self, now: float) -> float:
        """Judges everybody; how long until it is to be done again."""
        scan = _Scan(now, late_by(self._due, now))
        members = self._swarm.members.connected()
        for node_id, _ in self._watched():
            if not self._swarm.members.is_present(node_id):
                self._forget(node_id)
        for member in members:
            entry = self._update(member, scan)
            scan.verdicts[member.node_id] = judge(self._evidence(member, entry, now))
        if scan.nobody_is_well:
            for _, health in self._watched():
                health.lease = health.lease.renewed(now, RETURN_SECONDS)
        for member in members:
            self._act(member, scan)
        self._look_at_clusters(scan)
        soon = [verdict.look_again_seconds for verdict in scan.verdicts.values() if verdict.state is not State.LOST]
        return min([_LOOK_SECONDS, *soon])

    def _update(self, member: Member, scan: _Scan) -> ProviderHealth:
        links = (member.control.link, member.feed)
        received = max(*(link.last_received_at for link in links), member.uploads.heard_at)
        entry = member.health
        if entry is None:
            entry = member.health = ProviderHealth(Lease(scan.now), moved_at=scan.now)
        elif scan.late_seconds:
            entry.lease = after_a_stop(entry.lease, scan.late_seconds, scan.now)
        self._see_uploads(member, entry, scan.now)
        broken = [link.broken_at for link in links if link.broken_at is not None]
        entry.lease = entry.lease.seen(received, min(broken, default=None))
        if not broken:
            entry.refuses = False
        elif not entry.refuses and (entry.knocking is None or entry.knocking.done()):
            address = "" if member.reach is None else member.reach.address
            entry.knocking = asyncio.create_task(self._knock(address, entry)) if address else None
        return entry

    def _see_uploads(self, member: Member, entry: ProviderHealth, now: float) -> None:
        """A stage that does nothing but upload its state moves as that does."""
        entry.sends = ""
        if entry.report is None or entry.report.activity.kind != "save":
            return
        rate = self._swarm.members.line_rate(member.node_id) or 0.0
        working_until = member.uploads.working_until(rate, now)
        entry.moved_at = max(entry.moved_at, working_until or 0.0)
        claims = [claim for claim in entry.report.transfers if claim.kind == "checkpoint"]
        if claims:
            entry.sends = member.uploads.judged(claims[0], rate, now)

    def _evidence(self, member: Member, entry: ProviderHealth, now: float) -> Evidence:
        link = member.link.speed
        blocks = self._blocks(member.node_id)
        return Evidence(
            entry.lease.silent_seconds(now),
            entry.lease.broken_seconds(now),
            entry.lease.gaps,
            Uplink() if link is None else Uplink(link.round_trip_seconds, link.up_bytes_per_second),
            blocks,
            self._replacement(member.node_id) if blocks else "none",
            self._complaints(member.node_id),
            entry.refuses,
            blocks and not member.reports,
            entry.lease.spared_seconds(now),
        )

    def _complaints(self, about: str) -> tuple[str, ...]:
        """Who has lost its connection to this one, and is itself well."""
        return tuple(
            node_id
            for node_id, entry in self._watched()
            if entry.report is not None and entry.state is State.WELL and node_id != about
            if any(link.node == about and link.connections and not link.route for link in entry.report.links)
        )

    def _act(self, member: Member, scan: _Scan) -> None:
        node_id, entry = member.node_id, member.health
        assert entry is not None
        verdict = scan.verdicts[node_id]
        if verdict.state is State.LOST and not scan.nobody_is_well:
            self._lose(node_id, verdict.reason, entry.lease.silent_seconds(scan.now))
        elif verdict.state is State.WELL:
            # Where its connection was made anew, that is told elsewhere.
            if entry.state is not State.WELL and entry.connections == member.control.link.connections:
                self._emit("reconnected", f"{node_id} is heard again", provider=node_id)
            entry.state = State.WELL
        elif entry.state is State.WELL:
            entry.state, entry.connections = State.SUSPECTED, member.control.link.connections
            self._emit("suspected", verdict.reason, provider=node_id)

    def _look_at_clusters(self, scan: _Scan) -> None:
        clusters = [tuple(nodes) for nodes in self._clusters()]
        before, self._paces = self._paces, {}
        for nodes in clusters:
            entries = [health for health in map(self._health, nodes) if health is not None]
            if len(entries) < len(nodes) or any(entry.report is None for entry in entries):
                continue
            moved_at = max(entry.moved_at for entry in entries)
            pace = before.get(nodes)
            if pace is None or scan.late_seconds:
                longest_seconds = _FIRST_PIECE_SECONDS if pace is None else pace.longest_seconds
                pace = _ClusterPace(scan.now, moved_at, longest_seconds)
            if moved_at > pace.moved_at:
                gap = moved_at - max(pace.moved_at, pace.since)
                pace.longest_seconds, pace.moved_at = longest_after(pace.longest_seconds, gap), moved_at
            self._paces[nodes] = pace
            if all(entry.state is State.WELL for entry in entries):
                self._judge_cluster(nodes, entries, pace, scan.now)

    def _judge_cluster(
        self, nodes: Sequence[str], entries: Sequence[ProviderHealth], pace: _ClusterPace, now: float
    ) -> None:
        stages = [
            _stage_view(node_id, entry, now - max(entry.moved_at, pace.since))
            for node_id, entry in zip(nodes, entries, strict=True)
        ]
        stall = judge_stall(stages, pace.longest_seconds, self._replacement)
        for node_id, entry in zip(nodes, entries, strict=True):
            if stall is None or stall.node_id != node_id:
                if entry.stalls:
                    self._emit("reconnected", f"{node_id} does not hold its cluster up any more", provider=node_id)
                entry.stalls = False
            elif not entry.stalls:
                entry.stalls = True
                self._emit("suspected", stall.reason, provider=node_id)
        if stall is not None and stall.is_over:
            self._lose(stall.node_id, stall.reason, min(stage.still_seconds for stage in stages))

    def _lose(self, node_id: str, reason: str, detect_seconds: float) -> None:
        self._forget(node_id)
        self._on_lost(node_id, reason, detect_seconds)
        why = f"{node_id} was given up: {reason}; whatever it did has gone to others, it may join again and do more"
        self._swarm.dismiss(node_id, RefusedError(why))

    def _forget(self, node_id: str) -> None:
        if node_id not in self._swarm.members:
            return
        member = self._swarm.members[node_id]
        if member.health is not None and member.health.knocking is not None:
            member.health.knocking.cancel()
        member.health = None

    def _health(self, node_id: str) -> ProviderHealth | None:
        return self._swarm.members[node_id].health if node_id in self._swarm.members else None

    def _watched(self) -> list[tuple[str, ProviderHealth]]:
        """The providers under watch, by name."""
        known = ((node_id, self._health(node_id)) for node_id in self._swarm.members.node_ids())
        return [(node_id, health) for node_id, health in known if health is not None]

    async def _knock(self, address: str, entry: ProviderHealth) -> None:
        """Finds out whether anybody still listens where this provider did; takes its time where somebody does."""
        try:
            async with asyncio.timeout(_KNOCK_SECONDS):
                _, writer = await asyncio.open_connection(*split_address(address))
            writer.transport.abort()
            await asyncio.sleep(_KNOCK_SECONDS)
        except ConnectionRefusedError:
            entry.refuses = True
            self._swarm.members.changes.notify()
        except (OSError, TimeoutError):
            return

    def _broken(self) -> frozenset[tuple[str, bool]]:
        """Whose connection is down, and of whom it is known that nobody listens any more."""
        return frozenset(
            (member.session, member.health is not None and member.health.refuses)
            for member in self._swarm.members.connected()
            if member.control.link.broken_at is not None or member.feed.broken_at is not None
        )


def _stage_view(node_id: str, entry: ProviderHealth, still_seconds: float) -> StageView:
    assert entry.report is not None
    links = (
        LinkView(link.node, bool(link.route) or not link.connections, link.unconfirmed) for link in entry.report.links
    )
    return StageView(node_id, max(0.0, still_seconds), entry.report.ready, tuple(links), entry.sends)
