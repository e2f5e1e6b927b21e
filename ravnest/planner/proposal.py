"""Proposal: clusters that a search has put together, with the rate that they reach next to one another.

A proposal holds costs and names alone, so that a search can compare thousands of them. `planner/plan.py` is what a
chosen proposal becomes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.shared_limits import totals


@dataclass(frozen=True, slots=True)
class Proposal:
    """Clusters in the order of their first provider's name; those of a plan that was chosen come with its reasons."""

    clusters: tuple[Cluster, ...]
    standbys: tuple[str, ...]
    """Providers without a stage, by name."""
    rates: tuple[float, ...]
    """Samples per second of each cluster while the others train too."""
    averaging_seconds: float
    """Duration of one round."""
    predicted_samples_per_second: float
    score: float
    """Figure by which proposals are compared: the rate if training waited for every round, less the cost of staleness
    beyond the bound."""
    limit: str
    """The shared resource that limits the clusters; empty where each is limited by itself alone."""
    preferences: tuple[str, ...] = ()
    """Why this one was preferred to others that are about as fast, in sentences."""


def proposal_of(
    goal: Goal, network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]
) -> Proposal:
    """The proposal with these clusters, of all these providers."""
    ordered = tuple(sorted(clusters, key=lambda cluster: min(cluster.providers)))
    found = totals(goal, network, providers, ordered)
    busy = {name for cluster in ordered for name in cluster.providers}
    return Proposal(
        clusters=ordered,
        standbys=tuple(sorted(set(providers) - busy)),
        rates=found.rates,
        averaging_seconds=found.averaging_seconds,
        predicted_samples_per_second=found.samples_per_second,
        score=found.score,
        limit=found.limit,
    )
