"""How the clusters of a plan average: who with whom, how often, and what it takes of lines and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ravnest.errors import PlanError
from ravnest.graph.layout import layout
from ravnest.graph.portable import PortableGraph
from ravnest.job import Job
from ravnest.planner.averaging import average_every
from ravnest.planner.link_codecs import share_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.rings.rings import Ring, rings_of, round_seconds
from ravnest.planner.rings.tensors import RingPart, by_fragment, check_can_be_averaged, fragments, tensors_of
from ravnest.settings import Averaging


@dataclass(frozen=True, slots=True)
class AveragingOf:
    """How the clusters of a plan average."""

    rings: tuple[Ring, ...]
    parts: tuple[RingPart, ...]
    round_seconds: float
    """Of the fragment that takes longest."""
    every: int
    """Samples of all clusters together."""
    reason: str
    goal: Goal
    plan: Proposal
    """With the rate that comes of rounds as often as that."""


def averaging_of(
    settings: Averaging,
    graph: PortableGraph,
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
) -> AveragingOf:
    """Who averages what with whom in a plan of several clusters, and how often."""
    where = layout(graph)
    rings = rings_of(plan, model, network, providers)
    parts = fragments([(ring, tensors_of(graph, where, ring)) for ring in rings], settings.fragments)
    groups = by_fragment(parts)
    seconds = max(
        round_seconds([part.as_ring(goal.average_share) for part in group], network, providers) for group in groups
    )
    every, reason = average_every(settings, plan.rates, model.samples, goal.accumulate, seconds, len(groups))
    # Only now is it known how often there will be a round.
    goal = replace(goal, average_every=max(1, round(every / model.samples / len(plan.clusters))))
    plan = proposal_of(goal, network, providers, plan.clusters)
    return AveragingOf(rings, parts, seconds, every, reason, goal, plan)


def within_averaging(graph: PortableGraph, goal: Goal) -> Goal:
    """The goal, of one cluster where clusters cannot average this model; PlanError where it is to have several."""
    if goal.max_clusters != 1:
        try:
            check_can_be_averaged(graph)
        except PlanError:
            if goal.min_clusters > 1:
                raise
            return replace(goal, max_clusters=1)
    return goal


def averaged_bytes(averaging: Averaging) -> float:
    """What a number of a parameter takes on the line in a round."""
    moments = 8.0 if averaging.optimizer_state else 0.0
    return 4 * share_of(averaging.codec) + moments


def averaging_memory(job: Job) -> float:
    """What averaging keeps for each byte of a parameter."""
    averaging = job.averaging
    # The parameters as they were after the last round, and the outer optimizer's momentum; while a round goes on, what
    # this cluster has learned, and the mean. All of it are numbers of 4 bytes.
    numbers = 1 + (averaging.outer == "nesterov") + 2
    # What encoding has lost, for the next round, and what it loses in this.
    numbers += 2 * (averaging.codec == "int4")
    # Of both moments, this cluster's and the mean. Many optimizers have fewer.
    numbers += 4 * averaging.optimizer_state
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return 4.0 * numbers * sum(p.numel() for p in trained) / max(1, sum(p.nbytes for p in trained))
