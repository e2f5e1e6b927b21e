"""From groupings to clusters: exact cuts, and without the clusters that cost more than they bring.

Groupings come from estimates that ignore the resources that clusters share. Here every cluster gets its exact cuts, and
the slowest clusters, or those that take longest to average, are left out if that improves the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.local_search import Grouping
from ravnest.planner.search.refine_cuts import exact_cuts, finer_cuts
from ravnest.planner.shared_limits import totals

Allowed = Callable[[Sequence[Cluster]], bool]

_CROWDED: Final = 20
"""Clusters on shared hosts that are tried to be left out, one after the other."""
_EXACT: Final = 6
"""Clusters up to which cuts are exact in a model of many places too."""


class GroupingCutter:
    """Cuts the model for the groupings of these providers."""

    def __init__(self, model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> None:
        self._model, self._goal, self._network, self._providers = model, goal, network, providers
        self._by_name = {p.name: p for p in providers}
        self.slowed = _sharing_cores(providers)
        """The providers at the speed that their share of their host's cores allows."""

    def best(self, groupings: Sequence[tuple[float, Grouping]], allowed: Allowed | None) -> tuple[Cluster, ...]:
        """The best allowed clusters of these groupings, each given with its bound on averaging."""
        best: tuple[Cluster, ...] = ()
        best_score = 0.0
        for bound, grouping in groupings:
            for slowed in (False, True) if self.slowed is not self._providers else (False,):
                clusters = self._cut(grouping, bound, slowed)
                choices = self._trimmed(clusters)
                if allowed is not None:
                    choices = [choice for choice in choices if allowed(choice)] or [self._fewer(clusters, allowed)]
                for choice in choices:
                    score = self.score(choice)
                    if score > best_score * (1 + 1e-9):
                        best, best_score = choice, score
        return self._without_crowding(best, best_score) if allowed is None else best

    def score(self, clusters: Sequence[Cluster]) -> float:
        """The score of these clusters together; 0 for none."""
        return totals(self._goal, self._network, self._by_name, clusters).score if clusters else 0.0

    def _cut(self, grouping: Grouping, bound: float, slowed: bool) -> list[Cluster]:
        """Exact cuts for every cluster; with `slowed`, at the speed that shared cores allow."""
        found = []
        for order in grouping.orders:
            providers = [self._providers[i] for i in order]
            cut_for = [self.slowed[i] for i in order] if slowed else providers
            cluster = finer_cuts(self._model, self._goal, self._network, cut_for, bound)
            if cluster is not None and len(grouping.orders) <= _EXACT:
                cluster = exact_cuts(self._model, self._goal, self._network, cut_for, cluster, bound)
            if cluster is not None and slowed:
                cuts = [self._model.places.index(stage.start) for stage in cluster.stages[1:]]
                cluster = cluster_of(self._model, self._goal, self._network, providers, cuts, cluster.in_flight)
            if cluster is not None:
                found.append(cluster)
        return found

    def _trimmed(self, clusters: Sequence[Cluster]) -> list[tuple[Cluster, ...]]:
        """All clusters; and subsets without those that take longest to average, or without the slowest."""
        choices = [tuple(clusters)]

        def averaging(cluster: Cluster) -> float:
            lines = (self._by_name[stage.provider] for stage in cluster.stages)
            return max(
                stage.parameter_bytes / min(p.up_bytes_per_second, p.down_bytes_per_second)
                for stage, p in zip(cluster.stages, lines, strict=True)
            )

        by_averaging = sorted(clusters, key=lambda c: (averaging(c), c.providers))
        by_rate = sorted(clusters, key=lambda c: (-c.samples_per_second, c.providers))
        for ranked in (by_averaging, by_rate):
            for count in sorted({int(n) for n in np.geomspace(1, len(clusters), 24)}) if clusters else ():
                if count < len(clusters):
                    choices.append(tuple(ranked[:count]))
        return choices

    def _without_crowding(self, clusters: tuple[Cluster, ...], score: float) -> tuple[Cluster, ...]:
        """The clusters without those that cost others on the same hosts more than they bring."""
        crowded = {p.name for p, slowed in zip(self._providers, self.slowed, strict=True) if p is not slowed}
        for _ in range(_CROWDED):
            without = [
                tuple(c for c in clusters if c is not one)
                for one in clusters
                if len(clusters) > 1 and crowded.intersection(one.providers)
            ]
            best = max(without[:_CROWDED], key=self.score, default=())
            if self.score(best) <= score:
                break
            clusters, score = best, self.score(best)
        return clusters

    def _fewer(self, clusters: Sequence[Cluster], allowed: Allowed) -> tuple[Cluster, ...]:
        """The fastest of these clusters that are allowed together; the others' providers become standbys."""
        ranked = sorted(clusters, key=lambda c: (-c.samples_per_second, c.providers))
        for count in range(len(ranked), 0, -1):
            if allowed(ranked[:count]):
                return tuple(ranked[:count])
        return ()


def _sharing_cores(providers: Sequence[Provider]) -> Sequence[Provider]:
    """The providers, slowed down by their share where a host has too few cores for all of its providers."""
    wanted: dict[str, float] = {}
    for provider in providers:
        if provider.host:
            wanted[provider.host] = wanted.get(provider.host, 0) + provider.threads
    if not any(p.host and wanted[p.host] > p.cores for p in providers):
        return providers
    found = []
    for provider in providers:
        share = min(1.0, provider.cores / wanted[provider.host]) if provider.host else 1.0
        compute, memory = provider.compute_speed * share, provider.memory_speed * share
        slowed = replace(provider, compute_speed=compute, memory_speed=memory)
        found.append(slowed if share < 1 else provider)
    return found
