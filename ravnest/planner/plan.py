"""Plan of a run: its clusters, their stages and its rings. This tree is what is deployed.

The name of a provider stands in the cost of its stage and nowhere else: standbys, the cluster of a provider and the
owners of the rings follow from it. So replacing a provider is one edit (`Plan.with_takers`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.planner.averaging import RoundBasis
from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.rings.tensors import RingTensors


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its provider, its graph, and its predicted cost."""

    cost: StageCost
    stage: int
    role: str
    graph: PortableGraph
    parameters: int
    cluster: int = 0
    """Counted from 0, as the stages are."""
    split_backward: bool = False
    """Whether it sends gradients on before it computes those of its own weights."""

    @property
    def node(self) -> str:
        """The provider that holds it."""
        return self.cost.provider

    @property
    def start(self) -> int:
        """The place in the model where it begins, as `split` counts them."""
        return self.cost.start

    @property
    def codec(self) -> str:
        """Codec of activations and gradients on the link to the stage before."""
        return self.cost.codec


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """One cluster of a run."""

    id: int
    """Counted from 0."""
    stages: tuple[StagePlan, ...]
    in_flight: int
    ahead: int
    """Microbatches to feed beyond those in flight."""
    predicted_samples_per_second: float
    """While the other clusters train too."""
    flight_reason: str
    """Why this many microbatches are in flight."""
    samples: int = 1
    """In a microbatch."""
    split_reason: str = ""
    """Which stages split their backward, and why; empty with a single stage."""
    max_in_flight: int = 1
    """The number that memory and the staleness bound allow, should more be needed than planned."""
    cores_in_use: float = 0.0
    """How many of its stages compute at once on average while the cores of shared hosts are the limit; 0 if they are
    not."""
    feed_seconds: float = 0.0
    """Time for the report of a completed microbatch to reach the coordinator, and for the next microbatch to reach the
    stage that waits longest for it."""

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the model at which the cluster is cut."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def looks_up(self) -> bool:
        """Whether the leaf looks rows of a weight up for the root (graph/cutting/lookups.py)."""
        return bool(self.stages[-1].graph.lookups)

    def neighbours(self, stage: int) -> tuple[str, str]:
        """The providers of the stages that send this one activations and take its own; empty where there is none."""
        nodes, last = self.providers, len(self.stages) - 1
        before = nodes[stage - 1] if stage or self.looks_up else ""
        after = nodes[stage + 1] if stage < last else nodes[0] if self.looks_up else ""
        return before, after

    @property
    def beginners(self) -> tuple[str, ...]:
        """The providers that hold microbatches back while enough are in flight."""
        return (self.stages[0].node, self.stages[-1].node) if self.looks_up else (self.stages[0].node,)

    @property
    def cost(self) -> Cluster:
        """The predicted cost of all stages together."""
        return Cluster(tuple(stage.cost for stage in self.stages), self.in_flight, self.samples)

    @property
    def providers(self) -> tuple[str, ...]:
        """From root to leaf."""
        return tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """One ring of a run, or the part of it that is averaged in one fragment."""

    ring: int
    """Counted from 0, over all fragments."""
    fragment: int
    """Counted from 0."""
    owners: tuple[str, ...]
    """One provider of each cluster; each sends to the next, and the last to the first."""
    tensors: RingTensors
    codec: str = "float32"
    """Codec of the differences of its parameters."""
    piece_values: int = 0
    """Maximum number of values in a piece; 0: the default."""


@dataclass(frozen=True, slots=True)
class RingStages:
    """A ring as a plan keeps it: the stages that own its parameters, in the order of the ring."""

    fragment: int
    stages: tuple[tuple[int, int], ...]
    """Cluster and stage of each owner."""
    tensors: RingTensors
    codec: str = "float32"
    """See `RingPlan`."""
    piece_values: int = 0


@dataclass(frozen=True, slots=True)
class Basis:
    """Inputs of a plan, from which later decisions about it start."""

    model: ModelCosts
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]
    asked: Goal
    """The goal before the policy of versions and the distance between rounds were chosen."""

    def holds_for(self, asked: Goal, network: Network, providers: Mapping[str, Provider]) -> bool:
        """Whether the same plan would be made again."""
        return self.asked == asked and self.network == network and self.providers == providers


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that a run deploys."""

    clusters: tuple[ClusterPlan, ...]
    reason: str
    basis: Basis
    steady_samples_per_second: float
    """Predicted rate of all clusters, with the planned number in flight."""
    score: float
    """Figure by which the plan was chosen: see `Proposal.score`."""
    limit: str = ""
    """The shared resource that limits the clusters; empty where each is limited by itself alone."""
    averaging_seconds: float = 0.0
    """Duration of one round of averaging of everything."""
    ring_stages: tuple[RingStages, ...] = ()
    """Empty if there is one cluster."""
    round_seconds: float = 0.0
    """Predicted duration of a round of the fragment that takes longest."""
    average_every: int = 0
    """Samples of all clusters together between two rounds; 0 where there is one cluster."""
    average_reason: str = ""
    """Why rounds are this far apart, and how they travel."""
    round_basis: RoundBasis | None = None
    """Basis of the distance between rounds; None where there is one cluster."""
    versions_reason: str = ""
    """Why weights and activations are kept as they are."""
    slowed: float = 1.0
    """The share of the steady rate that is left over the whole run: fewer are in flight at high learning rates."""

    @property
    def predicted_samples_per_second(self) -> float:
        """Predicted rate over the whole run."""
        return self.slowed * self.steady_samples_per_second

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of all clusters, one cluster after the other."""
        return tuple(stage for cluster in self.clusters for stage in cluster.stages)

    @property
    def cluster_of(self) -> dict[str, int]:
        """The cluster of each provider that holds a stage."""
        return {stage.node: cluster.id for cluster in self.clusters for stage in cluster.stages}

    @property
    def standbys(self) -> tuple[str, ...]:
        """Providers without a stage, by name."""
        return tuple(sorted(self.basis.providers.keys() - self.cluster_of.keys()))

    @property
    def rates(self) -> tuple[float, ...]:
        """Samples per second of each cluster while the others train too."""
        return tuple(cluster.predicted_samples_per_second for cluster in self.clusters)

    @property
    def versions(self) -> str:
        """The policy by which stages keep weights and activations."""
        return self.basis.goal.versions

    @property
    def bound_in_flight(self) -> int | None:
        """The largest number ever allowed in flight in a cluster; None where nothing bounds it."""
        return self.basis.goal.bound_in_flight

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        """The rings with the providers that own their parameters now."""
        return tuple(
            RingPlan(
                number,
                ring.fragment,
                tuple(self.clusters[cluster].stages[stage].node for cluster, stage in ring.stages),
                ring.tensors,
                ring.codec,
                ring.piece_values,
            )
            for number, ring in enumerate(self.ring_stages)
        )

    @property
    def proposal(self) -> Proposal:
        """The costs of the clusters, for a search that starts from this plan."""
        return self.proposal_of(range(len(self.clusters)))

    def proposal_of(self, clusters: Collection[int]) -> Proposal:
        """The same for some of the clusters; providers of the others become standbys."""
        kept = [self.clusters[number] for number in clusters]
        whole = len(kept) == len(self.clusters)
        busy = {name for cluster in kept for name in cluster.providers}
        return Proposal(
            clusters=tuple(cluster.cost for cluster in kept),
            standbys=tuple(sorted(self.basis.providers.keys() - busy)),
            rates=tuple(cluster.predicted_samples_per_second for cluster in kept),
            averaging_seconds=self.averaging_seconds,
            predicted_samples_per_second=(
                self.steady_samples_per_second if whole else sum(c.predicted_samples_per_second for c in kept)
            ),
            score=self.score,
            limit=self.limit,
        )

    def with_takers(self, cluster: int, takers: Mapping[int, str], known: Mapping[str, Provider]) -> "Plan":
        """The plan in which these providers have taken over stages of a cluster, by number, without a change of cuts.

        `known` are machines that may have joined after the plan was made: the takers among them join the plan's basis.
        """
        old = self.clusters[cluster]
        stages = tuple(
            replace(stage, cost=replace(stage.cost, provider=takers.get(stage.stage, stage.node)))
            for stage in old.stages
        )
        clusters = [replace(old, stages=stages) if each is old else each for each in self.clusters]
        new = {name: known[name] for name in takers.values() if name in known}
        basis = replace(self.basis, providers={**self.basis.providers, **new})
        return replace(self, clusters=tuple(clusters), basis=basis)

    def without_owners_of(self, cluster: int) -> "Plan":
        """The plan in which no provider of this cluster takes part in a ring."""
        rings = tuple(
            replace(ring, stages=tuple(owner for owner in ring.stages if owner[0] != cluster))
            for ring in self.ring_stages
        )
        return replace(self, ring_stages=rings)


def stages_of(
    graph: PortableGraph, cluster: Cluster, number: int = 0, split_backward: Sequence[bool] = ()
) -> tuple[StagePlan, ...]:
    """The stages of cluster `number`, in order, cut from the graph of the whole model."""
    parts = split(graph, [stage.start for stage in cluster.stages[1:]])
    return tuple(
        StagePlan(
            cost=cost,
            stage=position,
            role=role_of(position, len(parts)),
            graph=part,
            parameters=sum(math.prod(p.shape) for p in part.parameters),
            cluster=number,
            split_backward=bool(split_backward) and split_backward[position],
        )
        for position, (cost, part) in enumerate(zip(cluster.stages, parts, strict=True))
    )


def role_of(stage: int, stages: int) -> str:
    """The role of a stage, as the glossary names it; a single stage is both root and leaf."""
    if stages == 1:
        return "root+leaf"
    return "root" if stage == 0 else "leaf" if stage == stages - 1 else "stem"
