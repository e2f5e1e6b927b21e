"""A plan: clusters of providers with the cuts of each, who stands by, who averages with whom, and the promised rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.planner.cluster import Cluster
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.shared_limits import totals


@dataclass(frozen=True, slots=True)
class Plan:
    """Clusters in the order of their first provider's name; those of a plan that was chosen come with its reasons."""

    clusters: tuple[Cluster, ...]
    standbys: tuple[str, ...]
    """Providers without a stage, by name."""
    rates: tuple[float, ...]
    """Samples a second of each cluster, beside the others."""
    averaging_seconds: float
    """Of one round."""
    predicted_samples_per_second: float
    score: float
    """What it was chosen by: as if training waited for every round, less what staleness beyond the bound takes."""
    limit: str
    """What the clusters share that holds them back; empty where each is held back by itself alone."""


def plan_of(goal: Goal, network: Network, providers: Mapping[str, Provider], clusters: Sequence[Cluster]) -> Plan:
    """The plan with these clusters, of all these providers."""
    ordered = tuple(sorted(clusters, key=lambda cluster: min(cluster.providers)))
    found = totals(goal, network, providers, ordered)
    busy = {name for cluster in ordered for name in cluster.providers}
    return Plan(
        clusters=ordered,
        standbys=tuple(sorted(set(providers) - busy)),
        rates=found.rates,
        averaging_seconds=found.averaging_seconds,
        predicted_samples_per_second=found.samples_per_second,
        score=found.score,
        limit=found.limit,
    )
