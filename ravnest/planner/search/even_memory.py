"""Even memory: of the cuts that are about as fast as the best, those with the smallest fullest stage.

A search compares rates alone. If the rate does not depend on the cuts, because a line or the cores of a shared host are
the limit, it may put nearly the whole model on one machine. Within a small share of the score, this step moves the
cuts so that the stages fill the memory of their providers evenly: no provider takes more of the model than it must.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.objective import score
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
    clusters, line_seconds = list(found.clusters), _line_seconds(providers, found)
    for number, cluster in enumerate(found.clusters):

        def is_good(tried: Cluster, number: int = number, before: Cluster = cluster) -> bool:
            if not found.limit:
                # The clusters share no limit, so that each is judged by itself.
                return score(goal, tried) >= (1 - TOLERANCE) * score(goal, before)
            others = [*clusters[:number], tried, *clusters[number + 1 :]]
            return _is_about_as_good(proposal_of(goal, network, providers, others), found)

        if len(cluster.stages) > 1:
            clusters[number] = _evened(model, goal, network, providers, cluster, line_seconds, is_good)
    evened = proposal_of(goal, network, providers, clusters)
    return evened if _is_about_as_good(evened, found) else found


def _evened(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    cluster: Cluster,
    line_seconds: float,
    is_good: Callable[[Cluster], bool],
) -> Cluster:
    """The cluster with the smallest fill that `is_good`, by bisection. The parameters of a stage pass its provider's
    line within `line_seconds`."""
    order = [providers[name] for name in cluster.providers]
    fixed = replace(goal, in_flight=cluster.in_flight)
    best, low, high = cluster, 0.0, fill(cluster, providers)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        lent_less = [replace(each, memory_bytes=int(middle * each.memory_bytes)) for each in order]
        tried = finer_cuts(model, fixed, network, lent_less, line_seconds)
        if tried is not None and is_good(tried):
            best, high = tried, fill(tried, providers)
        else:
            low = middle
    return best


def _line_seconds(providers: Mapping[str, Provider], found: Proposal) -> float:
    """The longest time in which the parameters of a stage pass its provider's line, which bounds a round of averaging;
    infinite without averaging."""
    if len(found.clusters) == 1:
        return math.inf
    lines = {name: min(p.up_bytes_per_second, p.down_bytes_per_second) for name, p in providers.items()}
    slowest = max(s.parameter_bytes / lines[s.provider] for cluster in found.clusters for s in cluster.stages)
    return slowest * (1 + 1e-9)


def _is_about_as_good(tried: Proposal, found: Proposal) -> bool:
    kept = 1 - TOLERANCE
    rates = zip(tried.rates, found.rates, strict=True)
    return tried.score >= kept * found.score and all(rate >= kept * before for rate, before in rates)
