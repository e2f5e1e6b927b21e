"""Best cluster of every set of a few providers, for tests that compare plans with it."""

from collections.abc import Sequence

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.order import best_of, coarse, ranked_orders


def best_clusters(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> dict[int, Cluster]:
    """For every set of providers (bit i: providers[i]) that can hold the model, its best cluster."""
    estimates = Estimates(coarse(model, len(providers)), goal, network, providers, fine=True)
    clusters: dict[int, Cluster] = {}
    for members, orders in ranked_orders(estimates).items():
        best = best_of(model, goal, network, [[providers[i] for i in order] for order in orders[:3]])
        if best is not None:
            clusters[members] = best
    return clusters
