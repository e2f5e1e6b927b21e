"""Averaging of a plan: the rings of its clusters, the interval between rounds, and the load on lines and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ravnest.errors import PlanError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import PortableGraph
from ravnest.job import Job
from ravnest.planner.averaging import average_every
from ravnest.planner.link_codecs import share_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.rings.rings import rings_of, round_seconds
from ravnest.planner.rings.tensors import RingPart, by_fragment, check_can_be_averaged, fragments, tensors_of
from ravnest.settings import Averaging


@dataclass(frozen=True, slots=True)
class AveragingOf:
    """The parts of the rings of a plan, and the interval between its rounds."""

    parts: tuple[RingPart, ...]
    round_seconds: float
    """Duration of a round of the slowest fragment."""
    every: int
    """Samples of all clusters between two rounds."""
    reason: str
    goal: Goal
    plan: Proposal
    """With the rate that this interval gives."""


def averaging_of(
    settings: Averaging,
    graph: PortableGraph,
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
) -> AveragingOf:
    """The averaging of a plan with several clusters."""
    where = layout(graph)
    rings = rings_of(plan, model, network, providers)
    parts = fragments([(ring, tensors_of(graph, where, ring)) for ring in rings], settings.fragments)
    groups = by_fragment(parts)
    seconds = max(
        round_seconds([part.as_ring(goal.average_share) for part in group], network, providers) for group in groups
    )
    every, reason = average_every(settings, plan.rates, model.samples, goal.accumulate, seconds, len(groups))
    # The interval follows from the plan, and changes its predicted rate.
    goal = replace(goal, average_every=max(1, round(every / model.samples / len(plan.clusters))))
    plan = proposal_of(goal, network, providers, plan.clusters)
    return AveragingOf(parts, seconds, every, reason, goal, plan)


def within_averaging(graph: PortableGraph, goal: Goal) -> Goal:
    """The goal, limited to one cluster if clusters cannot average this model; PlanError if it requires several."""
    if goal.max_clusters != 1:
        try:
            check_can_be_averaged(graph)
        except PlanError:
            if goal.min_clusters > 1:
                raise
            return replace(goal, max_clusters=1)
    return goal


def averaged_bytes(averaging: Averaging) -> float:
    """Bytes sent in a round for each value of a parameter."""
    moments = 8.0 if averaging.optimizer_state else 0.0
    return 4 * share_of(averaging.codec) + moments


def averaging_memory(job: Job) -> float:
    """Bytes of memory that averaging needs for each byte of a parameter."""
    averaging = job.averaging
    # The parameters after the last round, and the outer optimizer's momentum; during a round, this cluster's difference
    # and the mean. All of these are values of 4 bytes.
    numbers = 1 + (averaging.outer == "nesterov") + 2
    # The encoding error carried into this round, and the one that this round adds.
    numbers += 2 * (averaging.codec == "int4")
    # Both moments, each as this cluster's value and as the mean. Many optimizers have fewer.
    numbers += 4 * averaging.optimizer_state
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return 4.0 * numbers * sum(p.numel() for p in trained) / max(1, sum(p.nbytes for p in trained))
