"""Brute force: all partitions into clusters and standbys, all orders, and the best cuts of each."""

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.planning.instances import Instance
from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score
from ravnest.planner.shared_limits import totals


def best_score(instance: Instance) -> float:
    """The score of the best plan; 0 if the model fits nowhere."""
    providers = instance.providers
    by_name = {p.name: p for p in providers}
    by_set: dict[int, list[Cluster]] = {}
    for size in range(1, len(providers) + 1):
        for order in itertools.permutations(range(len(providers)), size):
            cluster = best_cuts(instance.model, instance.goal, instance.network, [providers[i] for i in order])
            if cluster is not None:
                by_set.setdefault(sum(1 << i for i in order), []).append(cluster)
    return max(
        (
            totals(instance.goal, instance.network, by_name, clusters).score
            for clusters in _choices(by_set, (1 << len(providers)) - 1)
        ),
        default=0.0,
    )


def best_listed_score(model: ModelCosts, goal: Goal, network: Network, order: Sequence[Provider]) -> float:
    """The score of the best of all cuts and all numbers in flight, for providers in this order; 0 where none fits."""
    numbers = range(1, goal.max_in_flight + 1) if goal.in_flight is None else (goal.max_in_flight,)
    best = 0.0
    for cuts in itertools.combinations(range(1, model.last), len(order) - 1):
        if not all(model.legal[i, j] for i, j in itertools.pairwise((0, *cuts, model.last))):
            continue
        for in_flight in numbers if len(order) > 1 else (1,):
            cluster = cluster_of(model, goal, network, order, cuts, in_flight)
            if all(s.memory_bytes <= p.memory_bytes for s, p in zip(cluster.stages, order, strict=True)):
                best = max(best, score(goal, cluster))
    return best


def _choices(by_set: dict[int, list[Cluster]], free: int) -> Iterator[tuple[Cluster, ...]]:
    """Every choice of clusters of which no two have a provider in common."""
    for members, clusters in by_set.items():
        # Each choice once: the set with the highest provider comes first.
        if members & ~free == 0:
            for cluster in clusters:
                yield (cluster,)
                below = free & ~members & ((1 << (members.bit_length() - 1)) - 1)
                for others in _choices(by_set, below):
                    yield (cluster, *others)
