"""Records of the coordinator about each ring: those of all rounds, and those of the current round."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ravnest.averaging.guards import TypicalContribution
from ravnest.averaging.participants import RingHistory
from ravnest.averaging.ring_round import RingRound
from ravnest.averaging.segments import pieces_received
from ravnest.planner.plan import RingPlan


@dataclass
class RingRecord:
    """A ring throughout a deployment."""

    plan: RingPlan
    committed: int = 0
    """The newest committed round."""
    samples: dict[str, int] = field(default_factory=dict)
    """For each owner the samples that its cluster had been fed at the last round that counted for it."""
    counted: dict[str, int] = field(default_factory=dict)
    """For each owner the last round that counted for it."""
    outlying: dict[str, int] = field(default_factory=dict)
    """For each owner the number of consecutive rounds, up to now, that left it out as an outlier."""
    typical: TypicalContribution | None = None
    """The typical contribution to the last committed round."""

    @property
    def history(self) -> RingHistory:
        return RingHistory(self.committed, self.counted, self.outlying, self.typical)

    def pieces_of(self, members: int) -> int:
        """The approximate number of pieces that each of this many members receives; moments do not count."""
        tensors, most = self.plan.tensors, self.plan.piece_values
        coded = sum(math.prod(spec.shape) for spec in tensors.parameters)
        return pieces_received(tensors.values, coded, members, *([most] if most else []))

    def owners_in(self, fed: Mapping[str, int]) -> dict[str, int]:
        """The owners that have been fed, in ring order, each with the samples since its last round."""
        return {node: fed[node] - self.samples.get(node, 0) for node in self.plan.owners if node in fed}

    def replace_owner(self, before: str, after: str) -> None:
        owners = tuple(after if owner == before else owner for owner in self.plan.owners)
        samples = self.samples.get(before, 0)
        self.drop_owners([before])
        self.plan = replace(self.plan, owners=owners)
        self.samples[after] = samples

    def drop_owners(self, nodes: Collection[str]) -> None:
        self.plan = replace(self.plan, owners=tuple(owner for owner in self.plan.owners if owner not in nodes))
        for record in (self.samples, self.outlying, self.counted):
            for node in nodes:
                record.pop(node, None)

    def commit(self, nodes: Collection[str], round: int, fed: Mapping[str, int]) -> None:
        """A round counts for these owners."""
        self.committed = round
        for node in nodes:
            self.samples[node] = fed[node]
            self.counted[node] = round
            self.outlying.pop(node, None)


@dataclass
class LiveRing:
    """A ring in the current round."""

    record: RingRecord
    round: RingRound
    applying: set[str] = field(default_factory=set)
    """Members that have not reported yet that the mean is in their parameters."""
    is_late: bool = False
    """Whether the wait for such a report timed out. The member applies the mean before it joins another round."""
    bytes_sent: dict[str, int] = field(default_factory=dict)
    """Bytes that each member sent in its latest attempt."""
    direct: set[str] = field(default_factory=set)
    """Members that sent over direct lines."""

    @property
    def is_over(self) -> bool:
        return self.round.outcome is not None and not self.applying

    def is_complete(self, fed: Mapping[str, int]) -> bool:
        """Whether all owners among the nodes of `fed` have the mean, or there was nothing to average."""
        if self.round.outcome != "committed":
            return self.round.has_nothing_new
        return not self.is_late and set(self.round.members) >= self.record.owners_in(fed).keys()
