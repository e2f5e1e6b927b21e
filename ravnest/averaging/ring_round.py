"""The coordinator's side of one round on one ring: who takes part, with which weight, and whether it commits.

A state machine without sockets and clock: it is told what happened and when, and says what to do. Owners join, those
who are behind catch up, an attempt begins, its members reduce, and when all of them say so with the same digest it
commits for all of them. Whoever is gone, late or to blame is left out and the rest begin a new attempt on the same
snapshots; a round that cannot go on is aborted, and nobody has changed anything.

    joining ──> catching up ──> reducing ──> committed
       └──────────────┴────────────┴───────> aborted
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from ravnest.averaging.deadlines import PhaseTime
from ravnest.averaging.guards import TypicalContribution, bounded, clip_outliers, typical_contribution
from ravnest.averaging.round_messages import Abort, Action, Begin, CatchUp, Commit, Join, Notice, RoundMember
from ravnest.averaging.stragglers import find_stragglers

__all__ = ["Abort", "Action", "Begin", "CatchUp", "Commit", "Join", "Notice", "RingRound", "RoundMember"]

SILENT_SECONDS: Final = 5.0
"""A member that is well says every second how far it is; one that has not for so long is silent."""
MAX_EXTENSIONS: Final = 20
"""How often more time is given to an attempt in which pieces still arrive."""
OUTLYING_ROUNDS: Final = 3
"""In the so many-th round in a row, one that is wildly beyond the others is not left out but its difference is dropped.

A difference only grows while its owner is left out: it would stay so for good, and of two clusters none would ever
average again. Not at once, since what is dropped is lost."""


class RingRound:
    """One round on one ring. Every method returns what to do now; after the outcome nothing changes any more.

    - An owner that did not join by the deadline, is gone, cannot take part, or is to blame for a failed attempt is left
      out with a Notice; those of them who joined are told by Abort.
    - One whose difference must not count, but which is to be like the others again, takes part without any weight: its
      difference is dropped, named in a Notice, and the commit gives it the mean of the others.
    - What is said about an older attempt, by somebody who has no part in it, or twice, is ignored.
    """

    def __init__(
        self,
        *,
        ring: int,
        round: int,
        owners: Sequence[str],
        samples: Mapping[str, int],
        committed: int,
        outlier: float | None,
        now: float,
        join_seconds: float,
        reduce_seconds: float,
        max_attempts: int = 5,
        counted: Mapping[str, int] | None = None,
        outlying: Mapping[str, int] | None = None,
        typical_before: TypicalContribution | None = None,
    ) -> None:
        """`owners` in ring order; `samples`: what the ledger knows that each did since its anchor; `committed`: the
        newest round that this ring has committed; `counted`: the newest that counted for each, with what it had learned
        by then; `outlying`: in how many rounds in a row before this one each was left out as wildly beyond the others;
        `typical_before`: what was usual in the last round that counted. Times are those of any clock that does not go
        back."""
        self.ring = ring
        self.round = round
        self.outcome: Literal["committed", "aborted"] | None = None
        self.deadline: float | None = now + join_seconds
        """When `tick` must be called next; None when the round is over."""
        self.left_out: dict[str, str] = {}
        """Who takes no part (any more), and why."""
        self.outliers: set[str] = set()
        """Those of them who were wildly beyond the others."""
        self.alike = False
        """Whether all owners joined, stand at the same round and have learned nothing since: there is nothing to do."""
        self.join_took: PhaseTime | None = None
        """How long the last one took to join, and how many were cut off; None while joining."""
        self.reduce_took: PhaseTime | None = None
        """How long the last attempt took, and how many were cut off in this round; None before one has ended."""
        self._owners = tuple(owners)
        self._ledger = samples
        self._committed = committed
        self._outlier = outlier
        self._reduce_seconds = reduce_seconds
        self._max_attempts = max_attempts
        self._counted = counted or {}
        self._outlying = outlying or {}
        self.typical = typical_before
        """What members brought into this round, if it counted, or into the last one that did."""
        self._begun = now
        self._last_joined = now
        self._joining = True
        self._joins: dict[str, Join] = {}
        self._samples: dict[str, int] = {}
        self._behind: dict[str, str | None] = {}
        self._tried: dict[str, frozenset[str]] = {}
        self._attempt = 0
        self._attempt_begun = now
        self._members: tuple[str, ...] = ()
        self._digests: dict[str, int] = {}
        self._heard: dict[str, tuple[int, float]] = {}
        self._arrived = 0
        self._extensions = 0
        self._accused: dict[str, str] = {}
        self._clipped: set[str] = set()
        self._dropped: set[str] = set()
        self._cut_off = 0
        self._disagreed = False

    @property
    def members(self) -> tuple[str, ...]:
        """Of the attempt under way, or of the one that was committed, in ring order."""
        return self._members

    @property
    def attempt(self) -> int:
        """The attempt under way, from 1; 0 before the first."""
        return self._attempt

    def joined(self, node: str, join: Join, now: float) -> list[Action]:
        """An owner has its snapshot, or says why it has none."""
        if node not in self._owners or node in self._joins:
            return []
        if self.outcome is not None or node in self.left_out:
            return [Abort((node,), self.left_out.get(node, "the round is over"))]
        why = self._unfit(join)
        if why is not None:
            return [*self._leave_out(node, why), Abort((node,), why), *self._go_on(now)]
        self._joins[node] = join
        self._last_joined = now
        self._samples[node], reason = bounded(join.samples, self._ledger.get(node, 0))
        actions: list[Action] = [Notice("bounded", reason, node)] if reason is not None else []
        if join.committed < self._counted.get(node, 0):
            # The mean of that round holds what it had learned: with what it brings now that would count once more.
            why = f"it stands at round {join.committed}, but round {self._counted[node]} counted for it"
            actions.append(self._drop(node, why))
        if join.committed < self._committed:
            self._behind[node] = None
        return [*actions, *self._find_donors(), *self._go_on(now)]

    def caught_up(self, node: str, now: float) -> list[Action]:
        """A member that was behind stands where the others do."""
        if self.outcome is not None or self._behind.get(node) is None:
            return []
        del self._behind[node]
        self._joins[node] = replace(self._joins[node], committed=self._committed)
        return self._go_on(now)

    def reduced(self, node: str, attempt: int, digest: int, now: float) -> list[Action]:
        """A member holds the result of an attempt, not yet applied."""
        if not self._concerns(node, attempt) or node in self._digests:
            return []
        self._digests[node] = digest
        if len(self._digests) < len(self._members):
            return []
        if len(set(self._digests.values())) == 1:
            self.reduce_took = PhaseTime(now - self._attempt_begun, self._cut_off)
            brought = [self._joins[node].norm for node in self._members]
            self.typical = (
                typical_contribution(brought, [self._samples[node] for node in self._members], self.typical)
                or self.typical
            )
            self._end("committed")
            return [Commit(self._attempt, self._members)]
        told = ", ".join(f"{node} {value:08x}" for node, value in self._digests.items())
        if self._disagreed:
            reason = f"members disagreed about the result twice: {told}"
            return [Notice("disagreed", reason), *self._abort(reason)]
        self._disagreed = True
        return [Notice("retry", f"members disagree about the result: {told}"), *self._begin(now)]

    def broke(self, node: str, attempt: int, reason: str, now: float) -> list[Action]:
        """A line of this member broke in the middle of an attempt: another may go well, with the same members."""
        if not self._concerns(node, attempt):
            return []
        return [Notice("retry", f"a line broke, {node} says: {reason}", node), *self._begin(now)]

    def failed(self, node: str, attempt: int, blamed: str, reason: str, now: float) -> list[Action]:
        """A member cannot finish an attempt, by its own fault (it blames itself) or somebody else's. Attempt 0: it
        could not catch up, and whoever was to help it is not asked again."""
        if self.outcome is None and attempt == 0 and self._behind.get(node) is not None:
            return [*self._find_donors(again=node), *self._go_on(now)]
        if not self._concerns(node, attempt):
            return []
        if blamed == node:
            guilty, why = node, reason
        elif blamed not in self._members:
            guilty, why = node, f"it blames {blamed}, who has no part in this attempt: {reason}"
        elif self._accused.setdefault(node, blamed) != blamed:
            # One liar could blame all others away, one after another.
            guilty, why = node, f"it blamed {self._accused[node]} first and {blamed} now: {reason}"
        else:
            guilty, why = blamed, f"{node} says: {reason}"
        return self._without((guilty,), why, now)

    def progressed(self, node: str, attempt: int, pieces: int, now: float) -> None:
        """A member is well, and has received so many pieces. All say so every second, also those who have finished:
        what is decided at the deadline rests on it."""
        if self._concerns(node, attempt):
            self._heard[node] = pieces, now

    def gone(self, node: str, reason: str, now: float) -> list[Action]:
        """An owner has left the swarm, or cannot be reached any more."""
        if self.outcome is not None or node not in self._owners or node in self.left_out:
            return []
        why = f"it is gone: {reason}"
        # It may be back before it knows what has become of an attempt that it had finished.
        told = [Abort((node,), why)] if node in self._joins else []
        return [*self._leave_out(node, why), *told, *self._after_loss((node,), now)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed; does nothing before `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._joining:
            waited = now - self._begun
            late = self._missing()
            actions = [a for node in late for a in self._leave_out(node, f"it did not join within {waited:.3g} s")]
            return [*actions, *self._go_on(now, late=len(late))]
        if not self._attempt:
            behind = tuple(self._behind)
            return self._without(behind, f"it did not catch up within {self._reduce_seconds:.3g} s", now)
        return self._late(now)

    # Joining

    def _unfit(self, join: Join) -> str | None:
        if join.refusal:
            return join.refusal
        if not (join.finite and math.isfinite(join.norm) and join.norm >= 0.0):
            return "its contribution holds values that are not finite"
        if join.committed > self._committed:
            return f"it says it has committed round {join.committed}, but this ring's newest is {self._committed}"
        return None

    def _missing(self) -> list[str]:
        return [owner for owner in self._owners if owner not in self._joins and owner not in self.left_out]

    def _go_on(self, now: float, late: int = 0) -> list[Action]:
        """Begins the first attempt, once everybody has joined or is left out, and nobody is behind."""
        actions: list[Action] = []
        if self._joining:
            if self._missing():
                return []
            self._joining = False
            self.join_took = PhaseTime(self._last_joined - self._begun, late)
            actions += self._settle_for_the_newest()
            self.deadline = now + self._reduce_seconds
        if self._attempt == 0 and not self._behind:
            actions += self._begin(now)
        return actions

    def _settle_for_the_newest(self) -> list[Action]:
        """Those who hold the ring's newest round may all be missing: then the newest of those here counts.

        Not where somebody may be catching up to the newest already: then two of them could stand at different places.
        """
        newest = max((join.committed for join in self._joins.values()), default=self._committed)
        if newest == self._committed or self._tried:
            return self._find_donors()
        reason = f"nobody who joined has round {self._committed} of this ring; it goes on from round {newest}"
        self._committed = newest
        for node in [node for node in self._behind if self._joins[node].committed == newest]:
            del self._behind[node]
        return [Notice("behind", reason), *self._find_donors()]

    def _find_donors(self, again: str | None = None) -> list[Action]:
        """Orders donations for those behind who have no donor; `again`: whose last one failed."""
        actions: list[Action] = []
        current = [node for node, join in self._joins.items() if join.committed == self._committed]
        for node, donor in list(self._behind.items()):
            if donor in current and node != again:
                continue
            tried = self._tried.get(node, frozenset())
            found = next((other for other in current if other not in tried), None)
            self._behind[node] = found
            if found is not None:
                self._tried[node] = tried | {found}
                actions.append(CatchUp(node, found))
            elif not self._joining or node == again:
                reason = "there is nobody (left) from whom it could catch up"
                actions += [*self._leave_out(node, reason), Abort((node,), reason)]
        return actions

    # Attempts

    def _concerns(self, node: str, attempt: int) -> bool:
        return self.outcome is None and attempt == self._attempt > 0 and node in self._members

    def _begin(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while True:
            nodes = [owner for owner in self._owners if owner in self._joins]
            norms, samples = [self._joins[node].norm for node in nodes], [self._samples[node] for node in nodes]
            verdicts = clip_outliers(norms, samples, self._outlier, self.typical)
            outliers = [(node, v.reason) for node, v in zip(nodes, verdicts, strict=True) if v.left_out]
            if not outliers:
                break
            for node, reason in outliers:
                before = self._outlying.get(node, 0)
                if before + 1 < OUTLYING_ROUNDS:
                    self.outliers.add(node)
                    actions += [*self._leave_out(node, reason), Abort((node,), reason)]
                else:
                    actions.append(self._drop(node, f"{reason}, and so it was {before} times before"))
        shares = dict(zip(nodes, samples, strict=True))
        if not any(samples):
            # The others may have averaged all they learned: those whose difference is dropped are to have that too.
            shares |= {node: 1 for node in nodes if self._dropped and node not in self._dropped}
        total = sum(shares.values())
        why = self._hopeless(nodes, total)
        if why is not None:
            self.alike = total == 0 and len(nodes) == len(self._owners) >= 2
            return [*actions, *self._abort(why)]
        for node, verdict in zip(nodes, verdicts, strict=True):
            if verdict.scale < 1.0 and node not in self._clipped:
                self._clipped.add(node)
                actions.append(Notice("clipped", verdict.reason, node))
        self._attempt += 1
        self._attempt_begun = now
        self._members = tuple(nodes)
        self._digests.clear()
        self._heard.clear()
        self._arrived = self._extensions = 0
        self.deadline = now + self._reduce_seconds
        members = tuple(
            RoundMember(node, shares[node] / total, self._joins[node].norm * verdict.scale)
            for node, verdict in zip(nodes, verdicts, strict=True)
        )
        counters = itertools.zip_longest(*(self._joins[node].counters for node in nodes), fillvalue=0)
        return [*actions, Begin(self._attempt, members, tuple(map(max, counters)))]

    def _hopeless(self, nodes: Sequence[str], samples: int) -> str | None:
        if len(nodes) < 2:
            return f"of {len(self._owners)} owners {'only ' + nodes[0] if nodes else 'nobody'} is left to average with"
        if samples == 0:
            return "nobody has learned anything since the last round"
        if self._attempt == self._max_attempts:
            return f"given up after {self._max_attempts} attempts"
        return None

    def _late(self, now: float) -> list[Action]:
        """Time is up for an attempt: gives it more while all are well and pieces arrive, else blames somebody."""
        heard = {node: pieces for node, (pieces, at) in self._heard.items() if now - at <= SILENT_SECONDS}
        arrived = sum(pieces for pieces, _ in self._heard.values()) + len(self._digests)
        silent = len(self._digests.keys() | heard.keys()) < len(self._members)
        if not silent and arrived > self._arrived and self._extensions < MAX_EXTENSIONS:
            # It takes longer than it was thought to.
            self._arrived = arrived
            self._extensions += 1
            self.deadline = now + max(self._reduce_seconds / 2, SILENT_SECONDS)
            return []
        verdict = find_stragglers(self._members, self._digests, heard)
        took = now - self._attempt_begun
        self._cut_off += max(len(verdict.nodes), 1)
        self.reduce_took = PhaseTime(took, self._cut_off)
        reason = f"the reduce was not done after {took:.3g} s: {verdict.reason}"
        return self._without(verdict.nodes, reason, now) if verdict.nodes else self._abort(reason)

    def _without(self, nodes: Sequence[str], reason: str, now: float) -> list[Action]:
        actions = [action for node in nodes for action in self._leave_out(node, reason)]
        return [*actions, Abort(tuple(nodes), reason), *self._after_loss(nodes, now)]

    def _after_loss(self, nodes: Sequence[str], now: float) -> list[Action]:
        if self._attempt == 0:
            return [*self._find_donors(), *self._go_on(now)]
        if not set(nodes) & set(self._members):
            return []
        return [Notice("retry", f"a new attempt without {', '.join(nodes)}"), *self._begin(now)]

    # Endings

    def _leave_out(self, node: str, reason: str) -> list[Action]:
        self.left_out[node] = reason
        self._joins.pop(node, None)
        self._behind.pop(node, None)
        return [Notice("left_out", reason, node)]

    def _drop(self, node: str, reason: str) -> Notice:
        """It takes part without weight: it adds nothing to the mean, which takes the place of its own difference."""
        self._dropped.add(node)
        self._samples[node] = 0
        self._joins[node] = replace(self._joins[node], norm=0.0)
        return Notice("dropped", f"{reason}: what it has learned since is dropped for the mean of the others", node)

    def _abort(self, reason: str) -> list[Action]:
        self._end("aborted")
        return [Abort(tuple(owner for owner in self._owners if owner in self._joins), reason)]

    def _end(self, outcome: Literal["committed", "aborted"]) -> None:
        self.outcome = outcome
        self.deadline = None
