"""Rounds of averaging: announces them, hears the owners of the rings, and tells them what each `RingRound` decides.

What happens on failure: an owner that is late, gone or breaks the rules is left out and named in an event; a ring that
cannot be closed without it is given up for this round, and everything learned goes into the next one.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.guards import TypicalContribution
from ravnest.averaging.ring_round import Abort, Action, Begin, CatchUp, Commit, Join, RingRound
from ravnest.errors import printable
from ravnest.monitor.summary import AveragingSummary
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    ProviderMessage,
    Report,
    RingAbort,
    RingBegin,
    RingCatchUp,
    RingCommit,
    RingMember,
    RingReduced,
    RingStanding,
)
from ravnest.planner.plan import RingPlan
from ravnest.units import counted

_MESSAGES: Final = frozenset({"round_joined", "ring_reduced", "ring_failed", "ring_applied"})

Emit = Callable[..., None]
"""Writes an event: its kind, its reason, and what belongs to it."""


@dataclass
class _Ring:
    """A ring through all rounds."""

    plan: RingPlan
    committed: int = 0
    """The newest round that counted here."""
    samples: dict[str, int] = field(default_factory=dict)
    """Of each owner's cluster, trained on by the last round that counted for it."""
    counted: dict[str, int] = field(default_factory=dict)
    """Of each owner, the last round that counted for it."""
    outlying: dict[str, int] = field(default_factory=dict)
    """In how many rounds in a row an owner has been left out as wildly beyond the others."""
    typical: TypicalContribution | None = None
    """What its owners brought into the last round that counted."""
    live: RingRound | None = None
    applying: set[str] = field(default_factory=set)
    """Owners that have not said yet that the mean is in their parameters."""
    late: bool = False
    """Whether one of them was not waited for: it takes the mean when it hears of it, before it joins another round."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of the attempt at hand, by owner."""
    direct: set[str] = field(default_factory=set)
    """Owners that sent over direct lines."""


class Rounds:
    """The rounds of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        rings: Sequence[RingPlan],
        deployment: str,
        outlier: float | None,
        deadlines: Deadlines,
        tell: Callable[[str, CoordinatorMessage], None],
        emit: Emit,
        changed: Callable[[], None],
    ) -> None:
        """`tell` says something to a provider; `changed` is called whenever a round may be over."""
        self._deployment = deployment
        self._outlier = outlier
        self._deadlines = deadlines
        self._tell = tell
        self._emit = emit
        self._changed = changed
        self._rings = [_Ring(ring) for ring in rings]
        self._round = 0
        self._began = 0.0
        self._apply_by = 0.0
        """Until when owners are waited for to say that the mean is in their parameters."""
        self._marked: Mapping[str, int] = {}
        self._under_way: list[_Ring] = []
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = 0.0
        self._bytes = 0
        self._counted = 0
        self._skipped = 0
        self.complete = False
        """Whether the last round counted on every ring it was for, for every owner."""
        self.last = ""
        """What came of the last round, in words."""

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def begun(self) -> int:
        """How many rounds have begun so far: the number of the newest."""
        return self._round

    @property
    def fragments(self) -> int:
        return max((ring.plan.fragment for ring in self._rings), default=0) + 1

    def counted_samples(self, nodes: Collection[str]) -> int:
        """How many samples of the cluster of these owners are in what all rings have averaged."""
        return min(
            (ring.samples.get(node, 0) for ring in self._rings for node in nodes if node in ring.plan.owners), default=0
        )

    def summary(self) -> AveragingSummary:
        return AveragingSummary(
            rounds=self._counted,
            rings=len(self._rings),
            seconds_mean=self._seconds / self._counted if self._counted else None,
            bytes=self._bytes,
            skipped=self._skipped,
        )

    def announce(self, fragment: int, owners: Mapping[str, int], reason: str) -> int:
        """Begins a round for the rings of a fragment (0: all) and these owners, each with the samples that its cluster
        has been fed by now; the number of the round. They are to be told of it."""
        assert not self._under_way, "one round after the other"
        self._round += 1
        self._began, self._marked = time.monotonic(), owners
        self._emit("round_begun", reason, round=self._round, fragment=fragment)
        for ring in self._rings:
            if fragment not in (0, ring.plan.fragment + 1):
                continue
            present = [node for node in ring.plan.owners if node in owners]
            ring.live = RingRound(
                ring=ring.plan.ring,
                round=self._round,
                owners=present,
                samples={node: owners[node] - ring.samples.get(node, 0) for node in present},
                committed=ring.committed,
                outlier=self._outlier,
                now=self._began,
                join_seconds=self._deadlines.joining.seconds,
                reduce_seconds=self._deadlines.reducing.seconds,
                counted=ring.counted,
                outlying=ring.outlying,
                typical_before=ring.typical,
            )
            ring.sent, ring.direct, ring.late = {}, set(), False
            self._under_way.append(ring)
        for ring in list(self._under_way):
            self._do(ring, self._live(ring).tick(self._began))
        self._settle()
        return self._round

    def take_over(self, stands: Mapping[str, Collection[RingStanding]], unaveraged: Mapping[str, int]) -> None:
        """Goes on after rounds that another coordinator has held, by where the owners say they stand; no more samples
        are believed to be in no round yet than are known to be. What was under way then is over."""
        self._round = max((stand.round for each in stands.values() for stand in each), default=0)
        for ring in self._rings:
            of_ring = {node: stand for node, each in stands.items() for stand in each if stand.ring == ring.plan.ring}
            ring.committed = max((stand.committed for stand in of_ring.values()), default=0)
            for node in ring.plan.owners:
                ring.samples[node] = -unaveraged[node]
            for node, stand in of_ring.items():
                # Whoever has the mean of the round that counted for others has brought into it what it had learned.
                ring.counted[node] = ring.committed if stand.reduced == ring.committed else stand.committed
                abort = RingAbort(
                    deployment=self._deployment,
                    round=self._round,
                    ring=ring.plan.ring,
                    reason="the coordinator was started again",
                )
                self._tell(node, CoordinatorMessage(ring_abort=abort))

    def heard(self, node_id: str, message: ProviderMessage) -> bool:
        """Whether this was about a round; what follows from it has been done then."""
        kind = message.WhichOneof("body")
        if kind not in _MESSAGES:
            return False
        body = getattr(message, str(kind))
        if body.deployment != self._deployment or body.round != self._round:
            return True
        now = time.monotonic()
        if kind == "round_joined":
            for joined in message.round_joined.rings:
                join = Join(
                    samples=joined.samples,
                    norm=joined.norm,
                    finite=joined.finite,
                    committed=joined.committed,
                    counters=tuple(joined.counters),
                    refusal=printable(joined.refusal),
                )
                self._hear(joined.ring, RingRound.joined, node_id, join, now)
        elif kind == "ring_reduced" and message.ring_reduced.caught_up:
            self._hear(message.ring_reduced.ring, RingRound.caught_up, node_id, now)
        elif kind == "ring_reduced":
            reduced = message.ring_reduced
            if reduced.ring < len(self._rings):
                self._note_sent(self._rings[reduced.ring], node_id, reduced)
            self._hear(reduced.ring, RingRound.reduced, node_id, reduced.attempt, reduced.digest, now)
        elif kind == "ring_failed":
            failed = message.ring_failed
            why = printable(failed.reason)
            if failed.again:
                self._hear(failed.ring, RingRound.broke, node_id, failed.attempt, why, now)
            else:
                # Who blames nobody has itself to blame.
                blamed = printable(failed.blamed) or node_id
                self._hear(failed.ring, RingRound.failed, node_id, failed.attempt, blamed, why, now)
        elif message.ring_applied.ring < len(self._rings):
            self._rings[message.ring_applied.ring].applying.discard(node_id)
        self._settle()
        return True

    def reported(self, node_id: str, report: Report) -> None:
        """How far a provider's attempts are."""
        now = time.monotonic()
        for progress in report.rings:
            ring = self._rings[progress.ring] if progress.ring < len(self._rings) else None
            if ring is not None and ring.live is not None and progress.round == self._round:
                ring.live.progressed(node_id, progress.attempt, progress.pieces, now)

    def gone(self, node_id: str, reason: str) -> None:
        """This owner takes no part any more in what is under way."""
        for ring in list(self._under_way):
            ring.applying.discard(node_id)
            if ring.live is not None and node_id in ring.plan.owners:
                self._do(ring, ring.live.gone(node_id, reason, time.monotonic()))
        self._settle()

    def replace_owner(self, before: str, after: str) -> None:
        """Somebody has taken the stage of an owner. It has no anchor of a round yet, and catches up before its next."""
        self.gone(before, f"{after} has its stage now")
        for ring in self._rings:
            if before not in ring.plan.owners:
                continue
            owners = tuple(after if owner == before else owner for owner in ring.plan.owners)
            ring.plan = replace(ring.plan, owners=owners)
            ring.samples[after] = ring.samples.pop(before, 0)
            ring.outlying.pop(before, None)
            ring.counted.pop(before, None)

    def drop_owners(self, nodes: Collection[str], reason: str) -> None:
        """Nobody has the stages of these any more: they may own something else, and this not."""
        for node in nodes:
            self.gone(node, reason)
        for ring in self._rings:
            owners = tuple(owner for owner in ring.plan.owners if owner not in nodes)
            ring.plan = replace(ring.plan, owners=owners)
            for kept in (ring.samples, ring.outlying, ring.counted):
                for node in nodes:
                    kept.pop(node, None)

    def close(self) -> None:
        """Nothing more is heard of rounds; the one under way is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._under_way = []

    def _all_alike(self, ring: _Ring) -> bool:
        """Whether every owner that the round was announced to has what came of it, or there was nothing to average."""
        live = self._live(ring)
        if live.outcome != "committed":
            return live.alike
        return not ring.late and set(live.members) >= {node for node in ring.plan.owners if node in self._marked}

    def _live(self, ring: _Ring) -> RingRound:
        assert ring.live is not None
        return ring.live

    def _hear(self, number: int, hear: Callable[..., list[Action]], *what: Any) -> None:
        ring = self._rings[number] if number < len(self._rings) else None
        if ring is not None and ring in self._under_way and ring.live is not None:
            self._do(ring, hear(ring.live, *what))

    def _do(self, ring: _Ring, actions: Collection[Action]) -> None:
        number = ring.plan.ring
        for action in actions:
            if isinstance(action, Begin):
                self._begin(number, action)
            elif isinstance(action, CatchUp):
                for node, other in ((action.donor, action.node), (action.node, action.donor)):
                    order = RingCatchUp(
                        deployment=self._deployment,
                        round=self._round,
                        ring=number,
                        node=other,
                        donate=node == action.donor,
                        committed=ring.committed,
                    )
                    self._tell(node, CoordinatorMessage(ring_catch_up=order))
            elif isinstance(action, Commit):
                self._commit(ring, action)
            elif isinstance(action, Abort):
                abort = RingAbort(deployment=self._deployment, round=self._round, ring=number, reason=action.reason)
                for node in action.nodes:
                    self._tell(node, CoordinatorMessage(ring_abort=abort))
            else:
                self._emit(action.kind, action.reason, provider=action.node, round=self._round, ring=number)

    def _begin(self, ring: int, action: Begin) -> None:
        members = [RingMember(node=m.node, weight=m.weight, norm=m.norm) for m in action.members]
        for index, member in enumerate(action.members):
            begin = RingBegin(
                deployment=self._deployment,
                round=self._round,
                ring=ring,
                attempt=action.attempt,
                members=members,
                counters=action.counters,
                index=index,
            )
            self._tell(member.node, CoordinatorMessage(ring_begin=begin))

    def _commit(self, ring: _Ring, action: Commit) -> None:
        for node in action.nodes:
            commit = RingCommit(
                deployment=self._deployment, round=self._round, ring=ring.plan.ring, attempt=action.attempt
            )
            self._tell(node, CoordinatorMessage(ring_commit=commit))
            ring.samples[node] = self._marked[node]
            ring.counted[node] = self._round
            ring.outlying.pop(node, None)
        ring.committed, ring.typical = self._round, self._live(ring).typical
        ring.applying = set(action.nodes)
        self._apply_by = time.monotonic() + self._deadlines.reducing.seconds
        self._bytes += sum(ring.sent.get(node, 0) for node in action.nodes)

    def _note_sent(self, ring: _Ring, node_id: str, reduced: RingReduced) -> None:
        ring.sent[node_id] = reduced.bytes_sent
        if reduced.direct:
            ring.direct.add(node_id)
        else:
            ring.direct.discard(node_id)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for ring in list(self._under_way):
            if ring.live is not None and ring.live.outcome is None:
                self._do(ring, ring.live.tick(now))
            elif ring.applying and now >= self._apply_by:
                for node in sorted(ring.applying):
                    reason = f"{node} has not said that it took the mean of round {self._round}; nobody waits for it"
                    self._emit("late", reason, provider=node, round=self._round, ring=ring.plan.ring)
                ring.applying.clear()
                ring.late = True
        self._settle()

    def _settle(self) -> None:
        """Notes a round that is over, and when to look next at one that is not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._under_way:
            return
        lives = [ring.live for ring in self._under_way if ring.live is not None]
        if all(live.outcome is not None for live in lives) and not any(ring.applying for ring in self._under_way):
            self._end(lives)
            return
        deadlines = [live.deadline for live in lives if live.outcome is None and live.deadline is not None]
        if any(ring.applying for ring in self._under_way):
            deadlines.append(self._apply_by)
        if deadlines:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(deadlines) - time.monotonic()), self._tick)

    def _end(self, lives: list[RingRound]) -> None:
        seconds = time.monotonic() - self._began
        committed = [live for live in lives if live.outcome == "committed"]
        self._deadlines.learn([live.join_took for live in lives], [live.reduce_took for live in lives])
        self.complete = all(self._all_alike(ring) for ring in self._under_way)
        for ring in self._under_way:
            for node in self._live(ring).outliers:
                ring.outlying[node] = ring.outlying.get(node, 0) + 1
        owners = max((len(live.members) for live in committed), default=0)
        what = f"{counted(len(committed), 'ring')} of {counted(len(lives), 'ring')}"
        self.last = f"round {self._round}: {what} averaged by {counted(owners, 'cluster')} in {seconds:.2f} s"
        if committed:
            self._counted += 1
            self._seconds += seconds
            rings = [ring for ring in self._under_way if ring.live in committed]
            lines, direct = sum(len(live.members) for live in committed), sum(len(ring.direct) for ring in rings)
            self._emit(
                "round", self.last, round=self._round, rings=len(committed), seconds=seconds, lines=lines, direct=direct
            )
        else:
            self._skipped += 1
            self.last = f"round {self._round}: nothing was averaged"
            self._emit("round_skipped", self.last, round=self._round, seconds=seconds)
        for ring in self._under_way:
            ring.live = None
        self._under_way = []
        self._changed()
