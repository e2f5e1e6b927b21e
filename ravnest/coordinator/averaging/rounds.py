"""Rounds of averaging: the coordinator announces them, hears the owners of the rings and sends each ring's decisions.

`RingRound` makes the decisions. An owner that is late, gone or breaks the rules is left out and named in an event. A
ring that cannot finish without it is aborted for this round, and everything learned goes into the next one.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.patience import Patience
from ravnest.averaging.ring_round import RingRound, RoundSettings
from ravnest.averaging.round_messages import Abort, Action, Begin, CatchUp, Commit, Join, Notice
from ravnest.coordinator.averaging.ring_records import LiveRing, RingRecord
from ravnest.errors import printable
from ravnest.monitor.summary import AveragingSummary
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    ProviderMessage,
    Report,
    RingAbort,
    RingApplied,
    RingBegin,
    RingCatchUp,
    RingCommit,
    RingFailed,
    RingMember,
    RingReduced,
    RingStanding,
    RoundJoined,
)
from ravnest.planner.plan import RingPlan
from ravnest.units import counted

Emit = Callable[..., None]
"""Writes an event, given its kind, its reason and its fields."""


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """The time of a round that ran in the background and counted on all its rings."""

    joining_seconds: float
    """Until the last owner had joined."""
    reducing_seconds: float
    """The reduce of the slowest ring."""
    seconds: float
    """The whole round, until the mean was in all stages."""


@dataclass
class _Totals:
    """Sums over all rounds."""

    committed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Rounds:
    """The rounds of one deployment. All methods run on the network's event loop."""

    def __init__(
        self,
        rings: Sequence[RingPlan],
        deployment: str,
        outlier: float | None,
        deadlines: Deadlines,
        tell: Callable[[str, CoordinatorMessage], None],
        emit: Emit,
        on_over: Callable[[], None],
    ) -> None:
        """`tell` sends a message to a provider; `on_over` is called when a round is over."""
        self.deployment = deployment
        self._outlier = outlier
        self._deadlines = deadlines
        self._tell = tell
        self._emit = emit
        self._on_over = on_over
        self._handlers: Mapping[str, Callable[[str, Any], None]] = {
            "round_joined": self._on_joined,
            "ring_reduced": self._on_reduced,
            "ring_failed": self._on_failed,
            "ring_applied": self._on_applied,
        }
        self._rings = [RingRecord(ring) for ring in rings]
        self._live: dict[int, LiveRing] = {}
        """The rings of the current round by number; empty between rounds."""
        self._round = 0
        self._fed: Mapping[str, int] = {}
        """The samples that the cluster of each owner had been fed when the current round was announced."""
        self._began = 0.0
        self._apply_by = 0.0
        """The deadline for reports that the mean is in the parameters."""
        self._timer: asyncio.TimerHandle | None = None
        self._totals = _Totals()
        self._is_urgent = False
        self.on_measured: Callable[[MeasuredRound], None] = lambda measured: None
        """Called with the time of each round that is like those to come."""
        self.complete = False
        """Whether the last round counted on all its rings and for all their owners."""
        self.last = ""
        """The outcome of the last round, as a sentence for the user."""

    @property
    def under_way(self) -> bool:
        return bool(self._live)

    @property
    def begun(self) -> int:
        """The number of rounds announced so far, which is the number of the newest round."""
        return self._round

    @property
    def fragments(self) -> int:
        return max((ring.plan.fragment for ring in self._rings), default=0) + 1

    def counted_samples(self, nodes: Collection[str]) -> int:
        """The samples of these owners' cluster that the averages of all rings contain."""
        return min(
            (ring.samples.get(node, 0) for ring in self._rings for node in nodes if node in ring.plan.owners), default=0
        )

    def summary(self) -> AveragingSummary:
        totals = self._totals
        return AveragingSummary(
            rounds=totals.committed,
            rings=len(self._rings),
            seconds_mean=totals.seconds / totals.committed if totals.committed else None,
            bytes=totals.bytes,
            skipped=totals.skipped,
        )

    def announce(
        self,
        fragment: int,
        owners: Mapping[str, int],
        reason: str,
        patience: Patience | None = None,
        is_urgent: bool = False,
    ) -> int:
        """Begin a round for the rings of a fragment (0: all rings) and return its number.

        `owners`: the nodes that take part, each with the samples that its cluster has been fed. The caller tells them
        of the round. `patience`: what leaving an owner out costs; None: the round waits for all. `is_urgent`: training
        stands still until the round is over.
        """
        assert not self.under_way, "one round after the other"
        self._round += 1
        self._is_urgent = is_urgent
        self._began, self._fed = time.monotonic(), owners
        self._emit("round_begun", reason, round=self._round, fragment=fragment)
        deadlines = self._deadlines
        settings = RoundSettings(
            deadlines.joining.seconds,
            deadlines.catching_up.seconds,
            deadlines.reducing.seconds,
            self._outlier,
            patience=patience,
            usual_reduce_seconds=deadlines.reducing.usual_seconds,
        )
        for ring in self._rings:
            if fragment in (0, ring.plan.fragment + 1):
                owners_of_ring = ring.owners_in(owners)
                ring_round = RingRound(owners_of_ring, ring.history, settings, self._began, ring.pieces_of)
                self._live[ring.plan.ring] = LiveRing(ring, ring_round)
        self._settle()
        return self._round

    def take_over(self, stands: Mapping[str, Collection[RingStanding]], unaveraged: Mapping[str, int]) -> None:
        """Continue after the rounds of a previous coordinator, from what the owners report; its last round is over.

        `unaveraged`: for each owner the known samples that no round contains yet. They bound the weight of its next
        contribution.
        """
        self._round = max((stand.round for each in stands.values() for stand in each), default=0)
        for ring in self._rings:
            number = ring.plan.ring
            of_ring = {node: stand for node, each in stands.items() for stand in each if stand.ring == number}
            ring.committed = max((stand.committed for stand in of_ring.values()), default=0)
            for node in ring.plan.owners:
                ring.samples[node] = -unaveraged[node]
            for node, stand in of_ring.items():
                # An owner that reduced a round which counted for the others has contributed to it, too.
                ring.counted[node] = ring.committed if stand.reduced == ring.committed else stand.committed
                self._abort(number, [node], "the coordinator was restarted")

    def heard(self, node_id: str, message: ProviderMessage) -> None:
        """A provider has sent a message. Does nothing for messages that are not about the current round."""
        kind = str(message.WhichOneof("body"))
        if kind not in self._handlers:
            return
        body = getattr(message, kind)
        if body.deployment == self.deployment and body.round == self._round:
            self._handlers[kind](node_id, body)
            self._settle()

    def reported(self, node_id: str, report: Report) -> None:
        """A provider has reported the progress of its attempts."""
        now = time.monotonic()
        for progress in report.rings:
            live = self._live.get(progress.ring)
            if live is not None and progress.round == self._round:
                live.round.progressed(node_id, progress.attempt, progress.pieces, now)

    def gone(self, node_id: str, reason: str) -> None:
        """This owner takes no part in the current round any more."""
        for live in list(self._live.values()):
            live.applying.discard(node_id)
            if node_id in live.record.plan.owners:
                self._do(live, live.round.gone(node_id, reason, time.monotonic()))
        self._settle()

    def replace_owner(self, before: str, after: str) -> None:
        """Another provider has taken an owner's stage. It has no anchor of a round yet and catches up before its next
        one."""
        self.gone(before, f"{after} has its stage now")
        for ring in self._rings:
            if before in ring.plan.owners:
                ring.replace_owner(before, after)

    def drop_owners(self, nodes: Collection[str], reason: str) -> None:
        """These owners' stages are given up. The nodes may own something else later."""
        for node in nodes:
            self.gone(node, reason)
        for ring in self._rings:
            ring.drop_owners(nodes)

    def close(self) -> None:
        """End the current round and ignore all later reports."""
        self._stop_timer()
        self._live = {}

    def _on_joined(self, node_id: str, message: RoundJoined) -> None:
        for joined in message.rings:
            live = self._live.get(joined.ring)
            if live is not None:
                join = Join(
                    samples=joined.samples,
                    norm=joined.norm,
                    finite=joined.finite,
                    committed=joined.committed,
                    counters=tuple(joined.counters),
                    refusal=printable(joined.refusal),
                )
                self._do(live, live.round.joined(node_id, join, time.monotonic()))

    def _on_reduced(self, node_id: str, message: RingReduced) -> None:
        live, now = self._live.get(message.ring), time.monotonic()
        if live is None:
            return
        if message.caught_up:
            self._do(live, live.round.caught_up(node_id, now))
            return
        live.bytes_sent[node_id] = message.bytes_sent
        if message.direct:
            live.direct.add(node_id)
        else:
            live.direct.discard(node_id)
        self._do(live, live.round.reduced(node_id, message.attempt, message.digest, now))

    def _on_failed(self, node_id: str, message: RingFailed) -> None:
        live, now = self._live.get(message.ring), time.monotonic()
        if live is None:
            return
        why = printable(message.reason)
        if message.again:
            self._do(live, live.round.broke(node_id, message.attempt, why, now))
        else:
            # A member that names no other member blames itself.
            blamed = printable(message.blamed) or node_id
            self._do(live, live.round.failed(node_id, message.attempt, blamed, why, now))

    def _on_applied(self, node_id: str, message: RingApplied) -> None:
        live = self._live.get(message.ring)
        if live is not None:
            live.applying.discard(node_id)

    def _do(self, live: LiveRing, actions: Collection[Action]) -> None:
        number = live.record.plan.ring
        for action in actions:
            match action:
                case Begin():
                    self._begin(live, action)
                case CatchUp():
                    self._catch_up(number, action.donor, action.node, action.committed, donate=True)
                    self._catch_up(number, action.node, action.donor, action.committed, donate=False)
                case Commit():
                    self._commit(live, action)
                case Abort():
                    self._abort(number, action.nodes, action.reason)
                case Notice():
                    self._emit(action.kind, action.reason, provider=action.node, round=self._round, ring=number)

    def _begin(self, live: LiveRing, action: Begin) -> None:
        plan = live.record.plan
        members = [RingMember(node=m.node, weight=m.weight, norm=m.norm) for m in action.members]
        for index, member in enumerate(action.members):
            begin = RingBegin(
                deployment=self.deployment,
                round=self._round,
                ring=plan.ring,
                attempt=action.attempt,
                members=members,
                counters=action.counters,
                index=index,
                codec=plan.codec,
                piece_values=plan.piece_values,
                urgent=self._is_urgent,
            )
            self._tell(member.node, CoordinatorMessage(ring_begin=begin))

    def _catch_up(self, ring: int, node: str, other: str, committed: int, donate: bool) -> None:
        order = RingCatchUp(
            deployment=self.deployment,
            round=self._round,
            ring=ring,
            node=other,
            donate=donate,
            committed=committed,
            urgent=self._is_urgent,
        )
        self._tell(node, CoordinatorMessage(ring_catch_up=order))

    def _abort(self, ring: int, nodes: Collection[str], reason: str) -> None:
        abort = RingAbort(deployment=self.deployment, round=self._round, ring=ring, reason=reason)
        for node in nodes:
            self._tell(node, CoordinatorMessage(ring_abort=abort))

    def _commit(self, live: LiveRing, action: Commit) -> None:
        ring = live.record
        commit = RingCommit(deployment=self.deployment, round=self._round, ring=ring.plan.ring, attempt=action.attempt)
        for node in action.nodes:
            self._tell(node, CoordinatorMessage(ring_commit=commit))
        ring.commit(action.nodes, self._round, self._fed)
        ring.typical = live.round.typical
        live.applying = set(action.nodes)
        self._apply_by = time.monotonic() + self._deadlines.reducing.seconds
        self._totals.bytes += sum(live.bytes_sent.get(node, 0) for node in action.nodes)

    def _tick(self) -> None:
        now = time.monotonic()
        for number, live in list(self._live.items()):
            if live.round.outcome is None:
                self._do(live, live.round.tick(now))
            elif live.applying and now >= self._apply_by:
                for node in sorted(live.applying):
                    reason = (
                        f"{node} has not confirmed in time that it applied the mean of round {self._round}; "
                        "the other clusters go on without waiting for it"
                    )
                    self._emit("late", reason, provider=node, round=self._round, ring=number)
                live.applying.clear()
                live.is_late = True
        self._settle()

    def _settle(self) -> None:
        """End the round if all its rings are done; otherwise set the timer for the next deadline."""
        self._stop_timer()
        if not self._live:
            return
        rings = self._live.values()
        if all(live.is_over for live in rings):
            self._end()
            return
        deadlines = [live.round.deadline for live in rings if live.round.deadline is not None]
        if any(live.applying for live in rings):
            deadlines.append(self._apply_by)
        if deadlines:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(deadlines) - time.monotonic()), self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        seconds = time.monotonic() - self._began
        rings, self._live = list(self._live.values()), {}
        committed = [live for live in rings if live.round.outcome == "committed"]
        self._deadlines.learn(
            [live.round.join_took for live in rings],
            [live.round.catch_up_took for live in rings],
            [live.round.reduce_took for live in rings],
        )
        self.complete = all(live.is_complete(self._fed) for live in rings)
        for live in rings:
            for node in live.round.outliers:
                live.record.outlying[node] = live.record.outlying.get(node, 0) + 1
        if committed:
            self._totals.committed += 1
            self._totals.seconds += seconds
            owners = max(len(live.round.members) for live in committed)
            what = f"{counted(len(committed), 'ring')} of {counted(len(rings), 'ring')}"
            self.last = f"round {self._round}: {what} averaged by {counted(owners, 'cluster')} in {seconds:.2f} s"
            lines, direct = (
                sum(len(live.round.members) for live in committed),
                sum(len(live.direct) for live in committed),
            )
            joins = [live.round.join_took.seconds for live in committed if live.round.join_took is not None]
            reduces = [live.round.reduce_took.seconds for live in committed if live.round.reduce_took is not None]
            measured = MeasuredRound(max(joins, default=0.0), max(reduces, default=0.0), seconds)
            if not self._is_urgent and not any(live.round.left_out or live.is_late for live in rings):
                self.on_measured(measured)
            numbers = {
                "joining_seconds": measured.joining_seconds,
                "reducing_seconds": measured.reducing_seconds,
                "rings": len(committed),
                "clusters": owners,
                "seconds": seconds,
                "lines": lines,
                "direct": direct,
            }
            self._emit("round", self.last, round=self._round, **numbers)
        else:
            self._totals.skipped += 1
            self.last = f"round {self._round}: nothing was averaged"
            self._emit("round_skipped", self.last, round=self._round, seconds=seconds)
        self._on_over()
