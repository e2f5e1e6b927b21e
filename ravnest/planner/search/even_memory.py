"""Even memory: of the cuts that are about as fast as the best, those with the smallest fullest stage.

A search compares rates alone. If the rate does not depend on the cuts, because a line or the cores of a shared host are
the limit, it may put nearly the whole model on one machine. Within a small share of the score, this step moves the
cuts so that the stages fill the memory of their providers evenly: no provider takes more of the model than it must.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.refine_cuts import finer_cuts

TOLERANCE: Final = 0.02
"""Share of the score, and of the rate of each cluster, that even memory may cost."""

_HALVINGS: Final = 6
"""Steps of the bisection for the smallest fill: it is found within 2 % of the memory."""


def fill(cluster: Cluster, providers: Mapping[str, Provider]) -> float:
    """Share of its provider's memory that the fullest stage takes."""
    return max(stage.memory_bytes / providers[stage.provider].memory_bytes for stage in cluster.stages)


def with_even_memory(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], found: Proposal
) -> Proposal:
    """The proposal with the same providers in the same order, and as many microbatches in flight, but cuts that fill
    the memory more evenly."""
    if len(found.clusters) == 1:
        # A cluster that trains alone keeps nothing for averaging.
        goal = replace(goal, max_clusters=1)
    best = found
    for number, cluster in enumerate(found.clusters):
        if len(cluster.stages) > 1:
            best = _evened(model, goal, network, providers, found, best, number)
    return best


def _evened(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    found: Proposal,
    best: Proposal,
    number: int,
) -> Proposal:
    """`best` with a smaller fill of the cluster with this number, by bisection."""
    cluster = best.clusters[number]
    order = [providers[name] for name in cluster.providers]
    fixed = replace(goal, in_flight=cluster.in_flight)
    low, high = 0.0, fill(cluster, providers)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        lent_less = [replace(each, memory_bytes=int(middle * each.memory_bytes)) for each in order]
        evened = finer_cuts(model, fixed, network, lent_less)
        tried = None if evened is None else _with_cluster(goal, network, providers, best, number, evened)
        if tried is not None and _is_about_as_good(tried, found):
            best, high = tried, fill(tried.clusters[number], providers)
        else:
            low = middle
    return best


def _with_cluster(
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    proposal: Proposal,
    number: int,
    cluster: Cluster,
) -> Proposal:
    clusters: Sequence[Cluster] = [*proposal.clusters[:number], cluster, *proposal.clusters[number + 1 :]]
    return proposal_of(goal, network, providers, clusters)


def _is_about_as_good(tried: Proposal, found: Proposal) -> bool:
    kept = 1 - TOLERANCE
    rates = zip(tried.rates, found.rates, strict=True)
    return tried.score >= kept * found.score and all(rate >= kept * before for rate, before in rates)
