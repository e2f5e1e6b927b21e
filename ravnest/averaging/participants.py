"""Owners that take part in one round of a ring: who has joined, who has to catch up, and the weight of each.

An owner that is behind needs the newest anchor of the ring from a donor, a participant that has it. Methods return what
the coordinator has to do; reasons end up in the events of the run.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ravnest.averaging.guards import (
    Clipping,
    TypicalContribution,
    bounded,
    clip_outliers,
    typical_contribution,
)
from ravnest.averaging.round_messages import Abort, Action, CatchUp, Join, Notice, RoundMember

OUTLYING_ROUNDS: Final = 3
"""The number of the consecutive round in which an outlier is no longer left out, but its difference is dropped.

An outlier's difference only grows while it is left out, so it would stay an outlier for good, and a ring of two would
never average again. The difference is not dropped at once, because that loses what the owner has learned."""


@dataclass(frozen=True, slots=True)
class RingHistory:
    """The earlier rounds of a ring, as far as the next round depends on them."""

    committed: int = 0
    """The newest committed round of the ring."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """For each owner the newest round whose mean contains what the owner had learned by then."""
    outlying: Mapping[str, int] = field(default_factory=dict)
    """For each owner the number of consecutive rounds, up to now, that left it out as an outlier."""
    typical: TypicalContribution | None = None
    """The typical contribution to the last committed round."""


@dataclass(slots=True)
class _Participant:
    """An owner that has joined and is not left out."""

    join: Join
    samples: int
    """Its weight, before division by the sum of all weights."""
    is_behind: bool
    donor: str | None = None
    """The participant that was told to send its anchor; None until one is found."""
    tried: frozenset[str] = frozenset()
    """All donors so far."""
    is_dropped: bool = False
    is_clipped: bool = False


class Participants:
    """The participants of one round. An owner that is left out does not come back in this round."""

    def __init__(self, owners: Mapping[str, int], history: RingHistory) -> None:
        """`owners`: in ring order, each with the samples since its anchor by the coordinator's ledger."""
        self.left_out: dict[str, str] = {}
        """The owners that take no part (any more), with the reason."""
        self.outliers: set[str] = set()
        """The owners that were left out as outliers."""
        self._owners = owners
        self._history = history
        self._committed = history.committed
        """The round of the anchor that all participants are to have."""
        self._present: dict[str, _Participant] = {}
        self._has_ordered_donation = False
        self._has_dropped = False

    def __contains__(self, node: str) -> bool:
        return node in self._present

    @property
    def nodes(self) -> tuple[str, ...]:
        """The participants in ring order."""
        return tuple(owner for owner in self._owners if owner in self._present)

    @property
    def missing(self) -> list[str]:
        """The owners that have neither joined nor been left out."""
        return [owner for owner in self._owners if owner not in self._present and owner not in self.left_out]

    @property
    def weighed(self) -> int:
        """The samples of all participants."""
        return self.weight_of(self._present)

    def weight_of(self, nodes: Iterable[str]) -> int:
        """The samples of these participants."""
        return sum(self._present[node].samples for node in nodes)

    def fed(self, nodes: Iterable[str]) -> int:
        """The samples since their anchors that these owners were fed, by the ledger."""
        return sum(max(self._owners[node], 0) for node in nodes)

    @property
    def behind(self) -> list[str]:
        """The participants that have to catch up."""
        return [node for node, each in self._present.items() if each.is_behind]

    @property
    def has_all_owners(self) -> bool:
        return len(self._present) == len(self._owners)

    def is_catching_up(self, node: str) -> bool:
        """Whether this participant is behind and a donor has been told to help it."""
        each = self._present.get(node)
        return each is not None and each.is_behind and each.donor is not None

    def refusal(self, join: Join) -> str | None:
        """The reason why an owner that joins like this cannot take part; None if it can."""
        if join.refusal:
            return join.refusal
        if not (join.finite and math.isfinite(join.norm) and join.norm >= 0.0):
            return "its contribution holds values that are not finite"
        if join.committed > self._committed:
            return f"it says it has committed round {join.committed}, but this ring's newest is {self._committed}"
        return None

    def add(self, node: str, join: Join) -> list[Action]:
        """An owner has joined."""
        samples, reason = bounded(join.samples, self._owners[node])
        self._present[node] = _Participant(join, samples, is_behind=join.committed < self._committed)
        actions: list[Action] = [Notice("bounded", reason, node)] if reason is not None else []
        counted = self._history.counted.get(node, 0)
        if join.committed < counted:
            # The mean of that round contains what this owner had learned; its new difference contains it again.
            actions.append(self._drop(node, f"it has round {join.committed}, but round {counted} counted for it"))
        return actions

    def leave_out(self, node: str, reason: str) -> list[Action]:
        self.left_out[node] = reason
        self._present.pop(node, None)
        return [Notice("left_out", reason, node)]

    def caught_up(self, node: str) -> None:
        """A participant that was behind has the newest anchor."""
        each = self._present[node]
        each.is_behind, each.join = False, replace(each.join, committed=self._committed)

    def settle_for_newest(self) -> list[Action]:
        """All owners with the ring's newest round may be missing: then the newest round of the participants counts.

        That is impossible once a donation has been ordered: a participant that already has the donation would have
        another anchor than the rest.
        """
        newest = max((each.join.committed for each in self._present.values()), default=self._committed)
        if newest == self._committed or self._has_ordered_donation:
            return []
        reason = f"no owner that joined has round {self._committed} of this ring; it goes on from round {newest}"
        self._committed = newest
        for each in self._present.values():
            each.is_behind = each.join.committed < newest
        return [Notice("behind", reason)]

    def find_donors(self, is_joining: bool, retry: str | None = None) -> list[Action]:
        """Order donations for the participants that are behind and have no donor. `retry`: one whose donation failed.

        While owners are still joining, a participant without a donor waits; afterwards it is left out.
        """
        actions: list[Action] = []
        donors = [node for node, each in self._present.items() if each.join.committed == self._committed]
        for node in self.behind:
            each = self._present[node]
            if each.donor in donors and node != retry:
                continue
            each.donor = next((other for other in donors if other not in each.tried), None)
            if each.donor is not None:
                each.tried |= {each.donor}
                self._has_ordered_donation = True
                actions.append(CatchUp(node, each.donor, self._committed))
            elif not is_joining or node == retry:
                reason = "there is no owner (left) from which it could catch up"
                actions += [*self.leave_out(node, reason), Abort((node,), reason)]
        return actions

    def exclude_outliers(self, outlier: float | None) -> tuple[list[Action], list[Clipping]]:
        """Leave out or drop all outliers. Returns the remaining participants' clippings, in ring order."""
        actions: list[Action] = []
        while True:
            nodes = self.nodes
            norms = [self._present[node].join.norm for node in nodes]
            samples = [self._present[node].samples for node in nodes]
            clippings = clip_outliers(norms, samples, outlier, self._history.typical)
            outliers = [(node, each.reason) for node, each in zip(nodes, clippings, strict=True) if each.is_left_out]
            if not outliers:
                return actions, clippings
            for node, reason in outliers:
                before = self._history.outlying.get(node, 0)
                if before + 1 < OUTLYING_ROUNDS:
                    self.outliers.add(node)
                    actions += [*self.leave_out(node, reason), Abort((node,), reason)]
                else:
                    actions.append(self._drop(node, f"{reason}, and so it was {before} times before"))

    def shares(self) -> dict[str, int]:
        """Each participant's weight before division by their sum, in ring order."""
        shares = {node: self._present[node].samples for node in self.nodes}
        if self._has_dropped and not any(shares.values()):
            # The others have averaged all they learned, and an owner whose difference was dropped needs that mean too.
            shares |= {node: 1 for node in shares if not self._present[node].is_dropped}
        return shares

    def members(self, shares: Mapping[str, int], clippings: list[Clipping]) -> tuple[list[Action], list[RoundMember]]:
        """The members of the next attempt, and a notice for each that is clipped for the first time."""
        actions: list[Action] = []
        members = []
        total = sum(shares.values())
        for node, clipping in zip(shares, clippings, strict=True):
            each = self._present[node]
            members.append(RoundMember(node, shares[node] / total, each.join.norm * clipping.scale))
            if clipping.scale < 1.0 and not each.is_clipped:
                each.is_clipped = True
                actions.append(Notice("clipped", clipping.reason, node))
        return actions, members

    def counters(self) -> tuple[int, ...]:
        """For each counter the largest value of all participants."""
        counters = itertools.zip_longest(*(each.join.counters for each in self._present.values()), fillvalue=0)
        return tuple(map(max, counters))

    def typical(self) -> TypicalContribution | None:
        """The typical contribution of the participants; that of the last committed round if they have none."""
        before, present = self._history.typical, self._present.values()
        return typical_contribution([p.join.norm for p in present], [p.samples for p in present], before) or before

    def _drop(self, node: str, reason: str) -> Notice:
        """Let a participant take part without weight: the mean of the others replaces its own difference."""
        each = self._present[node]
        self._has_dropped = each.is_dropped = True
        each.samples, each.join = 0, replace(each.join, norm=0.0)
        return Notice("dropped", f"{reason}: what it has learned since is dropped for the mean of the others", node)
