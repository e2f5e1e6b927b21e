"""What a run deploys: its clusters with their stages, who averages what with whom, and how often."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.rings.tensors import RingTensors
from ravnest.planner.search.split_choice import SplitChoice
from ravnest.planner.stage_plan import StagePlan
from ravnest.settings import Averaging
from ravnest.units import counted

MIN_UPDATES: Final = 10
"""Of each cluster between two rounds: so that what is averaged has been learned from more than a few microbatches."""

ROUND_SHARE: Final = 4
"""Times as long as a round takes, rounds are apart: at most a quarter of the time lines carry both."""


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
    """Beside the other clusters."""
    flight_reason: str
    """How many are in flight, and what for."""
    split_reason: str = ""
    """Which stages split their backward, and what for; empty with a single stage."""
    max_in_flight: int = 1
    """As many as memory and the bound on staleness allow, should more be needed than planned."""
    feed_seconds: float = 0.0
    """Word of a completed microbatch to the coordinator, and the next to the stage that waits longest for it."""
    line_seconds: float = 0.0
    """From one microbatch to the next, where a line is the limit; 0 where a stage is."""

    @property
    def places(self) -> tuple[int, ...]:
        """Where the model is cut."""
        return tuple(stage.start for stage in self.stages[1:])


@dataclass(frozen=True, slots=True)
class RingPlan:
    """One ring of a run, or the part of it that is averaged in one fragment."""

    ring: int
    """Counted from 0, over all fragments."""
    fragment: int
    """Counted from 0."""
    owners: tuple[str, ...]
    """One of each cluster; each sends to the next, and the last to the first."""
    tensors: RingTensors


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run deploys, and the plan it comes from."""

    plan: Plan
    clusters: tuple[ClusterPlan, ...]
    reason: str
    rings: tuple[RingPlan, ...] = ()
    """None where there is one cluster."""
    round_seconds: float = 0.0
    """What a round is predicted to take, of the fragment that takes longest."""
    average_every: int = 0
    """Samples of all clusters together between two rounds; 0 where there is one cluster."""
    average_reason: str = ""
    """Why so many."""
    versions: str = "stash"
    """The policy by which stages keep weights and activations."""
    versions_reason: str = ""
    bound_in_flight: int | None = None
    """As many as may ever be in flight in a cluster; None where nothing bounds them."""
    basis: "Basis | None" = None
    """What it was made from."""
    slowed: float = 1.0
    """The part of the plan's rate that is left over the whole run, where fewer are in flight at high learning rates."""

    @property
    def predicted_samples_per_second(self) -> float:
        return self.slowed * self.plan.predicted_samples_per_second

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Of all clusters, one cluster after the other."""
        return tuple(stage for cluster in self.clusters for stage in cluster.stages)

    @property
    def cluster_of(self) -> dict[str, int]:
        """By provider, the cluster that it has a stage of."""
        return {stage.node: cluster.id for cluster in self.clusters for stage in cluster.stages}

    @property
    def fragments(self) -> int:
        """In how many rounds everything is averaged once."""
        return max((ring.fragment for ring in self.rings), default=0) + 1


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan was made from: whoever changes it goes on from here."""

    model: ModelCosts
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]


def with_takers(plan: RunPlan, cluster: int, takers: Mapping[int, str], known: Mapping[str, Provider]) -> RunPlan:
    """The plan in which these have taken stages of a cluster, by number, as they are.

    Of `known` machines, those that take one belong to what the plan rests on from now on: they may not have been there
    when it was made.
    """
    running, planned = plan.clusters[cluster], plan.plan.clusters[cluster]
    names = {stage.node: takers[stage.stage] for stage in running.stages if stage.stage in takers}
    stages = tuple(replace(stage, node=names.get(stage.node, stage.node)) for stage in running.stages)
    costs = tuple(replace(cost, provider=names.get(cost.provider, cost.provider)) for cost in planned.stages)
    clusters = list(plan.clusters)
    clusters[cluster] = replace(running, stages=stages)
    in_plan = list(plan.plan.clusters)
    in_plan[cluster] = replace(planned, stages=costs)
    standbys = tuple(sorted({*plan.plan.standbys} - {*takers.values()}))
    rings = tuple(replace(ring, owners=tuple(names.get(owner, owner) for owner in ring.owners)) for ring in plan.rings)
    basis = plan.basis
    if basis is not None:
        new = {name: known[name] for name in takers.values() if name in known}
        basis = replace(basis, providers={**basis.providers, **new})
    return replace(
        plan,
        clusters=tuple(clusters),
        plan=replace(plan.plan, clusters=tuple(in_plan), standbys=standbys),
        rings=rings,
        basis=basis,
    )


def without_owners(plan: RunPlan, nodes: Collection[str]) -> RunPlan:
    """The plan in which these own nothing of what is averaged."""
    rings = (replace(r, owners=tuple(owner for owner in r.owners if owner not in nodes)) for r in plan.rings)
    return replace(plan, rings=tuple(rings))


def flight_reason(cluster: Cluster) -> str:
    """How many microbatches are in flight in a cluster, and what for."""
    way, busiest = cluster.round_trip_seconds, cluster.busiest_seconds
    flying = counted(cluster.in_flight, "microbatch", "microbatches")
    return (
        f"{flying} in flight: the way through all stages and back takes {way:.3g} s, "
        f"and the busiest stage or line {busiest:.3g} s"
    )


def split_reason(choices: Sequence[SplitChoice]) -> str:
    """Which stages of a cluster send gradients on before they compute those of their weights, and why."""
    after = choices[1:]
    if not after:
        return ""
    splitting = [number for number, choice in enumerate(choices) if choice.split]
    if not splitting:
        return f"backwards are not split: {after[0].reason}"
    stages = ", ".join(map(str, splitting))
    return f"backwards are split at stage{'s' if len(splitting) > 1 else ''} {stages}: {choices[splitting[0]].reason}"


def average_every(
    settings: Averaging,
    rates: Sequence[float],
    samples: int,
    accumulate: int,
    round_seconds: float,
    fragments: int,
) -> tuple[int, str]:
    """How many samples of all clusters together lie between two rounds, and why.

    The clusters have these rates, in samples a second, and microbatches of so many samples, of which `accumulate` make
    an update. What the job says counts. Otherwise every cluster makes a number of updates before everything has been
    averaged once, which takes `fragments` rounds; and a round takes a small part of the time until the next.
    """
    if settings.every is not None:
        return settings.every, f"a round after every {settings.every:,} samples, as averaging.every says"
    together = sum(rates)
    learned = MIN_UPDATES * accumulate * samples * together / min(rates) / fragments
    lasting = ROUND_SHARE * round_seconds * together
    every = max(1, math.ceil(max(learned, lasting)))
    if lasting > learned:
        why = f"{ROUND_SHARE} times as long as one takes, which is {round_seconds:.3g} s"
    else:
        in_turn = f" between two of the same of {fragments} fragments" if fragments > 1 else ""
        why = f"so that every cluster has made {MIN_UPDATES} updates{in_turn}"
    return every, f"a round after every {every:,} samples: {why}"
