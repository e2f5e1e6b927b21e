"""State of a run's clusters: the microbatches of each, and the choice of the cluster for the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ravnest.coordinator.feed.cluster_losses import ClusterLosses
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.planner.plan import ClusterPlan


class ClusterState(Enum):
    """State of a cluster. A lost cluster stays lost; the next deployment has clusters of its own."""

    FORMING = "forming"
    """Its providers fetch and link their stages, at first or after one of them was replaced. The cluster is not fed
    meanwhile."""
    TRAINING = "training"
    LOST = "lost"
    """The cluster does not train any more: a stage could not be replaced, or another deployment has begun."""


class RoundMark(NamedTuple):
    """A round of averaging that has not been announced to a cluster yet."""

    round: int
    fragment: int


class FedMicrobatch(NamedTuple):
    """A microbatch that was fed and may have to be fed again."""

    item: TrainBatch
    ends: bool
    """Whether it completed an update of its cluster."""


@dataclass
class ClusterRun:
    """State of one cluster."""

    plan: ClusterPlan
    fed_samples: int = 0
    samples: int = 0
    """Completed samples."""
    open: dict[int, TrainBatch] = field(default_factory=dict)
    """Microbatches in flight with their data, which another cluster is fed if this one is lost."""
    evaluating: dict[int, EvalBatch] = field(default_factory=dict)
    retained: dict[int, FedMicrobatch] = field(default_factory=dict)
    """Microbatches that were fed since its last replica, in order: a stage restored from the replica needs them."""
    dropped: int = 0
    """Microbatches that should be retained and had to be dropped."""
    sent: set[int] = field(default_factory=set)
    """Microbatches that were sent to its stages since they were linked, and are not done."""
    again: set[int] = field(default_factory=set)
    """Microbatches that were completed, and are replayed for a stage restored from a replica."""
    generation: int = 0
    """Number of its present links, higher than that of all earlier ones; frames of earlier generations are dropped."""
    resumed_at: float | None = None
    """When it first completed a microbatch in this generation, on the clock `time.monotonic`."""
    losses: ClusterLosses = field(default_factory=ClusterLosses)
    taking: set[int] = field(default_factory=set)
    """Stages with a new provider, which may lack microbatches that the others have applied."""
    state: ClusterState = ClusterState.TRAINING
    reason: str = ""
    """Why the cluster is not training."""
    mark: RoundMark | None = None
    in_flight: int = field(init=False)
    """Maximum number of microbatches between forward and backward at its root; at first as planned."""
    flight_reason: str = field(init=False)
    ahead: int = field(init=False)
    """Microbatches to feed beyond those in flight."""

    def __post_init__(self) -> None:
        self.in_flight, self.flight_reason, self.ahead = self.plan.in_flight, self.plan.flight_reason, self.plan.ahead

    @property
    def id(self) -> int:
        return self.plan.id

    @property
    def is_forming(self) -> bool:
        return self.state is ClusterState.FORMING

    @property
    def is_lost(self) -> bool:
        return self.state is ClusterState.LOST

    def begin_forming(self, reason: str) -> None:
        """Stops feeding the cluster until `resume`. The first reason stays."""
        if self.state is ClusterState.TRAINING:
            self.state, self.reason = ClusterState.FORMING, reason

    def resume(self) -> None:
        """Feeds the cluster again, when all stages are linked."""
        if self.state is ClusterState.FORMING:
            self.state, self.reason = ClusterState.TRAINING, ""

    def end(self, reason: str) -> None:
        """Ends the training of the cluster. The first reason stays."""
        if self.state is not ClusterState.LOST:
            self.state, self.reason = ClusterState.LOST, reason

    @property
    def nodes(self) -> list[str]:
        return [stage.node for stage in self.plan.stages]

    @property
    def inputs_of(self) -> list[tuple[str, tuple[str, ...]]]:
        """The values of a batch that each of its providers gets. A provider gets an empty frame if its stage has no
        inputs, and checks the frames of the stage before against it."""
        return [(stage.node, tuple(value.name for value in stage.graph.inputs)) for stage in self.plan.stages]

    @property
    def room(self) -> int:
        """Number of microbatches that can be fed now."""
        return 0 if self.is_forming else self.in_flight + self.ahead - len(self.open) - len(self.again)

    @property
    def room_to_send(self) -> int:
        """The same for replayed microbatches while the cluster is being rebuilt."""
        return self.in_flight + self.ahead - len(self.sent)

    def among_first(self, samples: int) -> set[int]:
        """The retained microbatches that are among the first `samples` that were fed."""
        found, end = set(), self.fed_samples
        for microbatch, kept in reversed(self.retained.items()):
            if end <= samples:
                found.add(microbatch)
            end -= kept.item.samples
        return found

    @property
    def evaluation_room(self) -> int:
        # The planned number, because a stage accepts few more microbatches at a time than it was told at first.
        return 0 if self.is_forming else 2 * self.plan.in_flight + self.plan.ahead - len(self.evaluating)


class Clusters:
    """Clusters of a run. All microbatches of an update go to one cluster, so at most one has an unfinished update."""

    def __init__(self, plans: Sequence[ClusterPlan]) -> None:
        self.all = [ClusterRun(plan) for plan in plans]
        self.replaced()
        self.group: ClusterRun | None = None
        """The cluster with an unfinished update; None without one."""

    def replaced(self) -> None:
        """Updates the clusters of providers, after a stage has changed its provider."""
        # Providers of a lost cluster may have a stage of another one now.
        self._by_node = {node: cluster for cluster in self.whole for node in cluster.nodes}

    @property
    def whole(self) -> list[ClusterRun]:
        """The clusters that are not lost."""
        return [cluster for cluster in self.all if not cluster.is_lost]

    def is_drained(self, ledger: Ledger) -> bool:
        """Whether all stages have applied all that was fed: no microbatch is in flight or waits to be fed again, and no
        cluster is being deployed or rebuilt."""
        return not ledger.outstanding and not any(cluster.is_forming or cluster.again for cluster in self.whole)

    def of(self, node_id: str) -> ClusterRun | None:
        """The cluster in which this provider has a stage, unless it is lost."""
        cluster = self._by_node.get(node_id)
        return None if cluster is None or cluster.is_lost else cluster

    def lose(self, cluster: ClusterRun, reason: str) -> tuple[list[TrainBatch], list[EvalBatch]]:
        """Ends the training of a cluster; returns the microbatches and evaluations that it has not completed."""
        cluster.end(reason)
        cluster.mark = None
        left, evaluations = list(cluster.open.values()), list(cluster.evaluating.values())
        cluster.open, cluster.evaluating, cluster.retained = {}, {}, {}
        cluster.sent, cluster.again = set(), set()
        if self.group is cluster:
            self.group = None
        return left, evaluations

    def for_batch(self) -> ClusterRun | None:
        """The cluster for the next microbatch; None while all are full."""
        if self.group is not None:
            return self.group if self.group.room > 0 else None
        return hungriest([(cluster, cluster.room) for cluster in self.whole])

    def for_evaluation(self) -> ClusterRun | None:
        return hungriest([(cluster, cluster.evaluation_room) for cluster in self.whole])


def hungriest(rooms: Sequence[tuple[ClusterRun, int]]) -> ClusterRun | None:
    """The cluster with the most room for its size; on a tie the one that was fed the fewest samples, then the first.
    None if all are full.

    So a faster cluster, which has room more often, gets more data. If the data is the bottleneck, all clusters have
    room, and all get their share.
    """
    cluster, room = max(rooms, key=lambda pair: (pair[1] / pair[0].in_flight, -pair[0].fed_samples), default=(None, 0))
    return cluster if room > 0 else None
