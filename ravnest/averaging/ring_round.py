"""The coordinator's state machine of one round on one ring: who takes part, and whether the round commits.

The state machine has no sockets and no clock. Callers tell it what happened and when, and it returns what to do. Owners
join, those that are behind catch up, an attempt begins, and its members reduce. When all members report the same
digest, the round commits for all of them. A member that is gone, late or to blame is left out, and the others begin
another attempt with the same snapshots. A round that cannot go on is aborted and has changed nothing at any member.

    joining ──> catching up ──> reducing ──> committed
       └──────────────┴────────────┴───────> aborted
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ravnest.averaging.catching_up import CatchingUp
from ravnest.averaging.deadlines import PhaseTime
from ravnest.averaging.participants import Participants, RingHistory
from ravnest.averaging.patience import Patience
from ravnest.averaging.reduce_attempt import SILENT_SECONDS, ReduceAttempt
from ravnest.averaging.round_messages import Abort, Action, Begin, Commit, Join, Notice


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """The settings of a round, the same for all its rings."""

    join_seconds: float
    catch_up_seconds: float
    """For owners that are behind, counted from the end of joining. More while pieces of the anchor arrive."""
    reduce_seconds: float
    outlier: float | None
    """See `guards.clip_outliers`."""
    max_attempts: int = 5
    patience: Patience | None = None
    """The costs of leaving an owner out; None: the round waits for all of them, until its deadlines."""
    usual_reduce_seconds: float = 0.0
    """The usual time of a reduce."""


class RingRound:
    """One round on one ring. Every method returns what to do now; after the outcome nothing changes any more.

    - An owner that misses the deadline, is gone, cannot take part, or is to blame for a failed attempt is left out with
      a Notice, and told by an Abort if it had joined.
    - An owner whose difference must not count takes part without any weight. A Notice names it, and the commit gives it
      the mean of the others in place of its own difference.
    - Reports about an older attempt, from nodes that have no part in it, or that come twice, are ignored.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        history: RingHistory,
        settings: RoundSettings,
        now: float,
        pieces_of: Callable[[int], int] = lambda members: 0,
    ) -> None:
        """`owners`: see `Participants`. Times may be those of any clock that does not go back. `pieces_of`: the number
        of pieces that each member receives in a reduce with this many members; 0: not known."""
        self.outcome: Literal["committed", "aborted"] | None = None
        self.deadline: float | None = now + settings.join_seconds
        """When to call `tick` next; None when the round is over."""
        self.has_nothing_new = False
        """Whether all owners joined with the same anchor and have learned nothing since: there is nothing to
        average."""
        self.join_took: PhaseTime | None = None
        """The time until the last owner joined; None while owners are joining."""
        self.catch_up_took: PhaseTime | None = None
        """The time that the round waited for owners to catch up; None before that is over, and if none was behind."""
        self.reduce_took: PhaseTime | None = None
        """The time of the last attempt; None before one has ended."""
        self.typical = history.typical
        """The typical contribution to this round if it committed, otherwise to the last round that did."""
        self._owner_count = len(owners)
        self._settings = settings
        self._pieces_of = pieces_of
        self._grace = ""
        """Why the round waits no longer for the owners that are still missing; empty before there is a quorum."""
        self._participants = Participants(owners, history)
        self._attempt = ReduceAttempt(0, (), now)
        self._catching_up = CatchingUp(now)
        self._began = now
        self._last_joined = now
        self._accused: dict[str, str] = {}
        self._cut_off = 0
        self._has_disagreed = False

    @property
    def left_out(self) -> Mapping[str, str]:
        """The owners that take no part (any more), with the reason."""
        return self._participants.left_out

    @property
    def outliers(self) -> set[str]:
        """The owners that were left out as outliers."""
        return self._participants.outliers

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the current or the committed attempt, in ring order."""
        return self._attempt.members

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1; 0 before the first."""
        return self._attempt.number

    def joined(self, node: str, join: Join, now: float) -> list[Action]:
        """An owner has taken its snapshot, or reports why it has none."""
        if node in self.left_out:
            return [Abort((node,), self.left_out[node])]
        if node not in self._participants.missing:
            return []
        if self.outcome is not None:
            return [Abort((node,), "the round is over")]
        why = self._participants.refusal(join)
        if why is not None:
            return [*self._participants.leave_out(node, why), Abort((node,), why), *self._advance(now)]
        self._last_joined = now
        actions = self._participants.add(node, join)
        actions += [*self._find_donors(), *self._advance(now)]
        self._set_grace(now)
        return actions

    def caught_up(self, node: str, now: float) -> list[Action]:
        """A member that was behind has the newest anchor."""
        if self.outcome is not None or not self._participants.is_catching_up(node):
            return []
        self._participants.caught_up(node)
        self._catching_up.caught_up()
        return self._advance(now)

    def reduced(self, node: str, attempt: int, digest: int, now: float) -> list[Action]:
        """A member has the result of an attempt and has not applied it yet."""
        if not self._concerns(node, attempt) or node in self._attempt.digests:
            return []
        self._attempt.digests[node] = digest
        if not self._attempt.is_reduced:
            return []
        if self._attempt.agrees:
            self.reduce_took = PhaseTime(now - self._attempt.began, self._cut_off)
            self.typical = self._participants.typical()
            self._end("committed")
            return [Commit(self.attempt, self.members)]
        told = ", ".join(f"{node} {value:08x}" for node, value in self._attempt.digests.items())
        if self._has_disagreed:
            reason = f"members disagreed about the result twice: {told}"
            return [Notice("disagreed", reason), *self._abort(reason)]
        self._has_disagreed = True
        return [Notice("retry", f"members disagree about the result: {told}"), *self._begin(now)]

    def broke(self, node: str, attempt: int, reason: str, now: float) -> list[Action]:
        """A line of this member broke in the middle of an attempt: retry with the same members."""
        if not self._concerns(node, attempt):
            return []
        return [Notice("retry", f"a line broke, {node} says: {reason}", node), *self._begin(now)]

    def failed(self, node: str, attempt: int, blamed: str, reason: str, now: float) -> list[Action]:
        """A member cannot finish an attempt and blames itself or another member.

        Attempt 0: it could not catch up, and its donor is not asked again.
        """
        if self.outcome is None and attempt == 0 and self._participants.is_catching_up(node):
            return [*self._find_donors(retry=node), *self._advance(now)]
        if not self._concerns(node, attempt):
            return []
        if blamed == node:
            guilty, why = node, reason
        elif blamed not in self.members:
            guilty, why = node, f"it blames {blamed}, who has no part in this attempt: {reason}"
        elif self._accused.setdefault(node, blamed) != blamed:
            # Otherwise one liar could have all others left out, one after another.
            guilty, why = node, f"it blamed {self._accused[node]} first and {blamed} now: {reason}"
        else:
            guilty, why = blamed, f"{node} says: {reason}"
        return self._without((guilty,), why, now)

    def progressed(self, node: str, attempt: int, pieces: int, now: float) -> None:
        """A member has received this many pieces: of the anchor in attempt 0, otherwise see
        `ReduceAttempt.add_progress`."""
        if self.attempt == 0 and attempt == 0 and self._participants.is_catching_up(node):
            self._catching_up.add_progress(node, pieces)
        elif self._concerns(node, attempt):
            self._attempt.add_progress(node, pieces, now)

    def gone(self, node: str, reason: str, now: float) -> list[Action]:
        """An owner has left the swarm, or cannot be reached any more."""
        if self.outcome is not None or not (node in self._participants or node in self._participants.missing):
            return []
        why = f"it is gone: {reason}"
        # An owner that had joined may reconnect while it still waits for the outcome of an attempt.
        told = [Abort((node,), why)] if node in self._participants else []
        return [*self._participants.leave_out(node, why), *told, *self._after_loss((node,), now)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed. Does nothing before `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.join_took is None:
            waited = now - self._began
            actions: list[Action] = []
            late = self._participants.missing
            why = f"it did not join within {waited:.3g} s"
            for node in late:
                actions += self._participants.leave_out(node, f"{why}: {self._grace}" if self._grace else why)
            # Owners that the round could have waited for say nothing about the deadline.
            return [*actions, *self._advance(now, cut_off=0 if self._grace else len(late))]
        if not self.attempt:
            return self._on_catch_up_timeout(now)
        return self._on_reduce_timeout(now)

    def _advance(self, now: float, cut_off: int = 0) -> list[Action]:
        """Begin the first attempt once all owners have joined or are left out, and no participant is behind."""
        actions: list[Action] = []
        if self.join_took is None:
            if self._participants.missing:
                return []
            self.join_took = PhaseTime(self._last_joined - self._began, cut_off)
            actions += [*self._participants.settle_for_newest(), *self._find_donors()]
            self._catching_up.joined(now)
            self.deadline = now + self._settings.catch_up_seconds
        if self.attempt == 0 and not self._participants.behind:
            self.catch_up_took = self._catching_up.took(now)
            actions += self._begin(now)
        return actions

    def _set_grace(self, now: float) -> None:
        """Bring the deadline for joining forward once there is a quorum."""
        patience, participants = self._settings.patience, self._participants
        if patience is None or self.join_took is not None or self.deadline is None:
            return
        grace = patience.grace(participants.fed(participants.missing), participants.weighed, len(participants.nodes))
        if grace is not None and now + grace.seconds < self.deadline:
            self.deadline, self._grace = now + grace.seconds, grace.reason

    def _find_donors(self, retry: str | None = None) -> list[Action]:
        return self._participants.find_donors(self.join_took is None, retry)

    def _concerns(self, node: str, attempt: int) -> bool:
        return self.outcome is None and self._attempt.concerns(node, attempt)

    def _begin(self, now: float) -> list[Action]:
        actions, clippings = self._participants.exclude_outliers(self._settings.outlier)
        shares = self._participants.shares()
        why = self._hopeless(shares)
        if why is not None:
            return [*actions, *self._abort(why)]
        clipped, members = self._participants.members(shares, clippings)
        self._attempt = ReduceAttempt(self.attempt + 1, tuple(shares), now)
        self.deadline = now + self._settings.reduce_seconds
        return [*actions, *clipped, Begin(self.attempt, tuple(members), self._participants.counters())]

    def _hopeless(self, shares: Mapping[str, int]) -> str | None:
        """The reason why another attempt is pointless; None if it is not."""
        if len(shares) < 2:
            left = f"only {next(iter(shares))}" if shares else "none"
            return f"of {self._owner_count} owners {left} is left to average with"
        if not any(shares.values()):
            self.has_nothing_new = self._participants.has_all_owners
            return "no owner has learned anything since the last round"
        if self.attempt == self._settings.max_attempts:
            return f"given up after {self._settings.max_attempts} attempts"
        return None

    def _on_catch_up_timeout(self, now: float) -> list[Action]:
        self.deadline = now + max(self._settings.catch_up_seconds / 2, SILENT_SECONDS)
        late = self._catching_up.give_up(self._participants.behind)
        waited = self._catching_up.waited(now)
        return self._without(late, f"it did not catch up within {waited:.3g} s", now) if late else []

    def _on_reduce_timeout(self, now: float) -> list[Action]:
        slow, why = self._not_worth_waiting_for(now)
        if slow:
            self.reduce_took = PhaseTime(now - self._attempt.began, self._cut_off)
            return self._without(slow, why, now)
        if self._attempt.extend(now):
            self.deadline = now + max(self._settings.reduce_seconds / 2, SILENT_SECONDS)
            return []
        stragglers = self._attempt.stragglers(now)
        took = now - self._attempt.began
        self._cut_off += max(len(stragglers.nodes), 1)
        self.reduce_took = PhaseTime(took, self._cut_off)
        reason = f"the reduce was not done after {took:.3g} s: {stragglers.reason}"
        return self._without(stragglers.nodes, reason, now) if stragglers.nodes else self._abort(reason)

    def _not_worth_waiting_for(self, now: float) -> tuple[tuple[str, ...], str]:
        """The members that a reduce goes on without because waiting for them costs more, and why; none if it does
        not."""
        patience, participants = self._settings.patience, self._participants
        remaining = self._attempt.remaining_seconds(now, self._pieces_of(len(self.members)))
        slow = self._attempt.stragglers(now).nodes
        if patience is None or remaining is None or not slow:
            return (), ""
        late = participants.weight_of(slow)
        others, again = participants.weighed - late, self._settings.usual_reduce_seconds
        why = patience.gives_up(late, others, len(self.members) - len(slow), remaining, again)
        return (slow if why else ()), why

    def _without(self, nodes: Sequence[str], reason: str, now: float) -> list[Action]:
        actions = [action for node in nodes for action in self._participants.leave_out(node, reason)]
        return [*actions, Abort(tuple(nodes), reason), *self._after_loss(nodes, now)]

    def _after_loss(self, nodes: Sequence[str], now: float) -> list[Action]:
        if self.attempt == 0:
            return [*self._find_donors(), *self._advance(now)]
        if not set(nodes) & set(self.members):
            return []
        return [Notice("retry", f"a new attempt without {', '.join(nodes)}"), *self._begin(now)]

    def _abort(self, reason: str) -> list[Action]:
        self._end("aborted")
        return [Abort(self._participants.nodes, reason)]

    def _end(self, outcome: Literal["committed", "aborted"]) -> None:
        self.outcome = outcome
        self.deadline = None
