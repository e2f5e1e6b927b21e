"""The clusters of a run while it goes on: what each has been fed, and which one gets the next microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ravnest.coordinator.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.run_plan import ClusterPlan


class RoundMark(NamedTuple):
    """A round of averaging that a cluster has not been told of yet."""

    round: int
    fragment: int


@dataclass
class ClusterRun:
    """One cluster at work."""

    plan: ClusterPlan
    fed_samples: int = 0
    samples: int = 0
    """Completed."""
    open: dict[int, TrainBatch] = field(default_factory=dict)
    """What it has been fed and has not completed; kept whole, to be fed to another cluster if this one is lost."""
    evaluating: dict[int, EvalBatch] = field(default_factory=dict)
    mark: RoundMark | None = None
    lost: str = ""
    """Why it does not train any more."""
    in_flight: int = field(init=False)
    """Microbatches between forward and backward at its root, at most: as planned, until something else was decided."""
    flight_reason: str = field(init=False)
    ahead: int = field(init=False)
    """Microbatches to feed beyond those in flight."""

    def __post_init__(self) -> None:
        self.in_flight, self.flight_reason, self.ahead = self.plan.in_flight, self.plan.flight_reason, self.plan.ahead

    @property
    def id(self) -> int:
        return self.plan.id

    @property
    def nodes(self) -> list[str]:
        return [stage.node for stage in self.plan.stages]

    @property
    def inputs_of(self) -> list[tuple[str, tuple[str, ...]]]:
        """Which values of a batch go to which of its providers."""
        return [(s.node, tuple(v.name for v in s.graph.inputs)) for s in self.plan.stages if s.graph.inputs]

    @property
    def room(self) -> int:
        """Microbatches that it can be fed now."""
        return self.in_flight + self.ahead - len(self.open)

    @property
    def evaluation_room(self) -> int:
        # As planned: no stage takes many more at a time than it was told to begin with.
        return 2 * self.plan.in_flight + self.plan.ahead - len(self.evaluating)


class Clusters:
    """All of them. What belongs to one update goes to one cluster, so that at most one has an update unfinished."""

    def __init__(self, plans: Sequence[ClusterPlan]) -> None:
        self.all = [ClusterRun(plan) for plan in plans]
        self._by_node = {node: cluster for cluster in self.all for node in cluster.nodes}
        self.group: ClusterRun | None = None
        """Which one has an update unfinished."""

    @property
    def whole(self) -> list[ClusterRun]:
        """Those that can train."""
        return [cluster for cluster in self.all if not cluster.lost]

    def of(self, node_id: str) -> ClusterRun | None:
        """The one that this provider has a stage in, unless it is lost."""
        cluster = self._by_node.get(node_id)
        return None if cluster is None or cluster.lost else cluster

    def lose(self, cluster: ClusterRun, reason: str) -> tuple[list[TrainBatch], list[EvalBatch]]:
        """This one does not train any more; what it has not completed."""
        cluster.lost, cluster.mark = reason, None
        left, evaluations = list(cluster.open.values()), list(cluster.evaluating.values())
        cluster.open, cluster.evaluating = {}, {}
        if self.group is cluster:
            self.group = None
        return left, evaluations

    def for_batch(self) -> ClusterRun | None:
        """Who gets the next microbatch; None while nobody has room for it."""
        if self.group is not None:
            return self.group if self.group.room > 0 else None
        return hungriest([(cluster, cluster.room) for cluster in self.whole])

    def for_evaluation(self) -> ClusterRun | None:
        return hungriest([(cluster, cluster.evaluation_room) for cluster in self.whole])


def hungriest(rooms: Sequence[tuple[ClusterRun, int]]) -> ClusterRun | None:
    """The cluster with most room, which has waited longest for its size; the first of several. None: all are full.

    Data goes to whoever asks: a faster cluster has room more often, and so it does more.
    """
    cluster, room = max(rooms, key=lambda pair: pair[1] / pair[0].in_flight, default=(None, 0))
    return cluster if room > 0 else None
