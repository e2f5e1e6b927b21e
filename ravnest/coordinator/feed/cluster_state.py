"""The clusters of a run while it goes on: what each has been fed, and which one gets the next microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.planner.plan import ClusterPlan


class ClusterState(Enum):
    """State of a cluster of a deployment. A lost cluster stays lost; a deployment that replaces it has clusters of its
    own."""

    FORMING = "forming"
    """Its providers fetch and link their stages: for the first time, or again after one of them was replaced. The
    cluster is not fed meanwhile."""
    TRAINING = "training"
    LOST = "lost"
    """It does not train any more: a stage could not be replaced, or another deployment has taken over."""


class RoundMark(NamedTuple):
    """A round of averaging that a cluster has not been told of yet."""

    round: int
    fragment: int


class FedMicrobatch(NamedTuple):
    """A microbatch that was fed and may have to be fed again."""

    item: TrainBatch
    ends: bool
    """Whether it completed an update of the cluster that it was fed to."""


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
    retained: dict[int, FedMicrobatch] = field(default_factory=dict)
    """What it has been fed since its last replica, in order: a stage that begins with the replica needs it again."""
    dropped: int = 0
    """Of those, so many could not be kept."""
    sent: set[int] = field(default_factory=set)
    """What its stages have been sent since they were formed, and have not said to be done."""
    again: set[int] = field(default_factory=set)
    """Completed before, and to be done once more for a stage that begins with a replica."""
    generation: int = 0
    """Grows whenever it is formed; what comes of an older one is passed over."""
    resumed_at: float | None = None
    """When it completed something for the first time since it was formed, on the clock `time.monotonic`."""
    returned: set[str] = field(default_factory=set)
    """Who held a stage of it, was lost, and is back before another has taken it."""
    taking: set[int] = field(default_factory=set)
    """Stages that somebody has taken, or is to take, who may lack what the others have applied."""
    state: ClusterState = ClusterState.TRAINING
    reason: str = ""
    """Why the cluster is not training."""
    mark: RoundMark | None = None
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
    def is_forming(self) -> bool:
        return self.state is ClusterState.FORMING

    @property
    def is_lost(self) -> bool:
        return self.state is ClusterState.LOST

    def begin_forming(self, reason: str) -> None:
        """The cluster is not fed until `resume`. The first reason stays."""
        if self.state is ClusterState.TRAINING:
            self.state, self.reason = ClusterState.FORMING, reason

    def resume(self) -> None:
        """All stages are linked: the cluster is fed again."""
        if self.state is ClusterState.FORMING:
            self.state, self.reason = ClusterState.TRAINING, ""

    def end(self, reason: str) -> None:
        """The cluster does not train any more. The first reason stays."""
        if self.state is not ClusterState.LOST:
            self.state, self.reason = ClusterState.LOST, reason

    @property
    def nodes(self) -> list[str]:
        return [stage.node for stage in self.plan.stages]

    @property
    def inputs_of(self) -> list[tuple[str, tuple[str, ...]]]:
        """Which values of a batch go to which of its providers. Each is told of every microbatch, also where its stage
        has no inputs: what the stage before says of it is held against that."""
        return [(stage.node, tuple(value.name for value in stage.graph.inputs)) for stage in self.plan.stages]

    @property
    def room(self) -> int:
        """Microbatches that it can be fed now."""
        return 0 if self.is_forming else self.in_flight + self.ahead - len(self.open) - len(self.again)

    @property
    def room_to_send(self) -> int:
        """The same while it is being formed: of those that are fed again."""
        return self.in_flight + self.ahead - len(self.sent)

    def among_first(self, samples: int) -> set[int]:
        """Of what is retained, the microbatches that are among the first so many samples that it was fed."""
        found, end = set(), self.fed_samples
        for microbatch, kept in reversed(self.retained.items()):
            if end <= samples:
                found.add(microbatch)
            end -= kept.item.samples
        return found

    @property
    def evaluation_room(self) -> int:
        # As planned: no stage takes many more at a time than it was told to begin with.
        return 0 if self.is_forming else 2 * self.plan.in_flight + self.plan.ahead - len(self.evaluating)


class Clusters:
    """All of them. What belongs to one update goes to one cluster, so that at most one has an update unfinished."""

    def __init__(self, plans: Sequence[ClusterPlan]) -> None:
        self.all = [ClusterRun(plan) for plan in plans]
        self.replaced()
        self.group: ClusterRun | None = None
        """Which one has an update unfinished."""

    def replaced(self) -> None:
        """A stage has another owner than before."""
        # Who is left of a lost one may have a stage of another by now.
        self._by_node = {node: cluster for cluster in self.whole for node in cluster.nodes}

    @property
    def whole(self) -> list[ClusterRun]:
        """Those that can train."""
        return [cluster for cluster in self.all if not cluster.is_lost]

    def is_drained(self, ledger: Ledger) -> bool:
        """Whether all stages have applied all that was fed: no microbatch is in flight or waits to be fed again, and no
        cluster is being deployed."""
        return not ledger.outstanding and not any(cluster.is_forming or cluster.again for cluster in self.whole)

    def of(self, node_id: str) -> ClusterRun | None:
        """The one that this provider has a stage in, unless it is lost."""
        cluster = self._by_node.get(node_id)
        return None if cluster is None or cluster.is_lost else cluster

    def lose(self, cluster: ClusterRun, reason: str) -> tuple[list[TrainBatch], list[EvalBatch]]:
        """This one does not train any more; what it has not completed."""
        cluster.end(reason)
        cluster.mark = None
        left, evaluations = list(cluster.open.values()), list(cluster.evaluating.values())
        cluster.open, cluster.evaluating, cluster.retained = {}, {}, {}
        cluster.sent, cluster.again = set(), set()
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
    """The cluster with most room, which has waited longest for its size; of several alike the one that was fed least,
    then the first. None: all are full.

    Data goes to whoever asks: a faster cluster has room more often, and so it does more. Where the data is what is
    slow, all have room, and all are to learn from it.
    """
    cluster, room = max(rooms, key=lambda pair: (pair[1] / pair[0].in_flight, -pair[0].fed_samples), default=(None, 0))
    return cluster if room > 0 else None
