"""Exhaustive search over the clusters of few providers: every set, and every partition into sets and standbys.

The best orders of every set are estimated, for several bounds on the averaging time. The partitions with the best
estimates get exact cuts, and are compared by the score of all their clusters.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.estimates import Estimates, Orders
from ravnest.planner.search.objective import averaging_bounds, score_of
from ravnest.planner.search.order import PLACES, coarse, ranked_orders
from ravnest.planner.search.refine_cuts import exact_cuts, few_places, finer_cuts
from ravnest.planner.shared_limits import totals

MOST: Final = 8
"""Providers up to which this search is used."""

_BOUNDS: Final = 12
_BOUND_ORDERS: Final = 4
"""Orders of a set that are compared for each bound on averaging."""

_CUT: Final = 24
"""Partitions that get exact cuts."""

_CUT_ORDERS: Final = 3
_FINER: Final = 3
"""Partitions that are cut in the model with all its places."""


class FewProviders:
    """The possible clusters of few providers."""

    def __init__(
        self,
        model: ModelCosts,
        goal: Goal,
        network: Network,
        providers: Sequence[Provider],
        places: int = PLACES,
    ) -> None:
        self._model, self._goal, self._network, self._providers = model, goal, network, providers
        self._by_name = {p.name: p for p in providers}
        self._rough = few_places(model)
        self._estimates = Estimates(coarse(model, len(providers), places), goal, network, providers, fine=True)
        self._orders = {
            members: orders
            for members, orders in ranked_orders(self._estimates).items()
            if members.bit_count() >= goal.min_stages
        }
        self._sets = list(self._orders)
        self._rates: dict[float, tuple[Table, dict[int, Orders]]] = {}
        self._clusters: dict[tuple[int, float], Cluster | None] = {}

    @property
    def can_hold_model(self) -> bool:
        return bool(self._sets)

    def best(self, standbys: int, allowed: Callable[[Sequence[Cluster]], bool] | None = None) -> tuple[Cluster, ...]:
        """The best allowed clusters that leave at least `standbys` providers without a stage; none if there are
        none."""
        most = len(self._providers) - standbys
        partitions = [
            p
            for p in self._partitions()
            if len(p) >= self._goal.min_clusters and self._goal.min_providers <= _members(p).bit_count() <= most
        ]
        if not partitions:
            return ()
        scored: list[tuple[float, float, tuple[Cluster, ...]]] = []
        for partition, bound in self._promising(partitions):
            clusters = [self._cluster(members, bound) for members in partition]
            found = tuple(c for c in clusters if c is not None)
            if len(found) < len(clusters) or (allowed is not None and not allowed(found)):
                continue
            scored.append((self._score(*found), bound, found))
        scored.sort(key=lambda one: -one[0])
        if self._rough is self._model:
            return scored[0][2] if scored else ()
        finer = [(bound, self._finer(clusters, bound)) for _, bound, clusters in scored[:_FINER]]
        if not finer:
            return ()
        bound, best = max(finer, key=lambda one: self._score(*one[1]))
        exact = []
        for cluster in best:
            order = [self._by_name[name] for name in cluster.providers]
            exact.append(exact_cuts(self._model, self._goal, self._network, order, cluster, bound))
        return max((best, tuple(exact)), key=lambda clusters: self._score(*clusters))

    def _finer(self, clusters: Sequence[Cluster], bound: float) -> tuple[Cluster, ...]:
        """The same clusters, cut in the model with all its places."""
        found = []
        for cluster in clusters:
            order = [self._by_name[name] for name in cluster.providers]
            found.append(finer_cuts(self._model, self._goal, self._network, order, bound) or cluster)
        return tuple(found)

    def _promising(self, partitions: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]]:
        """Partitions, each with its best bound on averaging, the most promising first."""
        position = {members: i for i, members in enumerate(self._sets)}
        most = max(len(p) for p in partitions)
        # A column of rate 0 after those of the sets fills up partitions with fewer clusters.
        index = np.array([[position[m] for m in p] + [len(self._sets)] * (most - len(p)) for p in partitions])
        counts = np.array([float(len(p)) for p in partitions])
        bounds = averaging_bounds(self._model, self._providers, _BOUNDS) if most > 1 else [math.inf]
        scored: dict[tuple[tuple[int, ...], float], float] = {}
        for bound in dict.fromkeys((math.inf, *bounds)):
            rates = np.append(self._rates_within(bound)[0], 0.0)
            together = rates[index].sum(axis=1)
            complete = (rates[index] > 0).sum(axis=1) == counts
            if math.isinf(bound) and len(bounds) > 1:
                # Without a bound, only single clusters count: they do not average.
                complete &= counts == 1
            score = np.where(complete, score_of(self._goal, self._model.samples, together, counts, bound), 0.0)
            for i in np.argsort(-score, kind="stable")[:_CUT]:
                if score[i] > 0:
                    scored[partitions[i], bound] = float(score[i])
        if self._share_something:
            for partition in self._best_sharing(partitions):
                scored[partition, math.inf] = math.inf
        ranked = sorted(scored, key=lambda key: (-scored[key], key))
        return ranked[: 2 * _CUT if self._share_something else _CUT]

    def _best_sharing(self, partitions: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The best partitions if shared resources may be the limit: all of them are compared with exact cuts."""
        found: list[tuple[float, tuple[int, ...]]] = []
        for partition in partitions:
            clusters = [self._cluster(members, math.inf) for members in partition]
            complete = [c for c in clusters if c is not None]
            if len(complete) == len(clusters):
                found.append((self._score(*complete), partition))
        return [partition for _, partition in sorted(found, key=lambda pair: (-pair[0], pair[1]))[:_CUT]]

    @property
    def _share_something(self) -> bool:
        hosts = [p.host for p in self._providers if p.host]
        requester = self._network.requester
        limits = (requester.up_bytes_per_second, requester.down_bytes_per_second)
        return bool(hosts) or not all(math.isinf(limit) for limit in limits)

    def _rates_within(self, bound: float) -> tuple[Table, dict[int, Orders]]:
        """The estimated rate of every set within this bound on averaging, and its orders, the best first."""
        if bound not in self._rates:
            rates = np.zeros(len(self._sets))
            orders: dict[int, Orders] = {}
            self._estimates.limit_averaging(bound)
            by_size: dict[int, list[int]] = {}
            for i, members in enumerate(self._sets):
                by_size.setdefault(members.bit_count(), []).append(i)
            for which in by_size.values():
                rows = [self._orders[self._sets[i]][:_BOUND_ORDERS] for i in which]
                found, _ = self._estimates.rates(np.concatenate(rows))
                start = 0
                for i, row in zip(which, rows, strict=True):
                    of_set = found[start : start + len(row)]
                    start += len(row)
                    rates[i] = of_set.max()
                    orders[self._sets[i]] = row[np.argsort(-of_set, kind="stable")]
            self._rates[bound] = rates, orders
        return self._rates[bound]

    def _cluster(self, members: int, bound: float) -> Cluster | None:
        key = members, bound
        if key not in self._clusters:
            orders = self._rates_within(bound)[1][members][:_CUT_ORDERS]
            rows = [[self._providers[i] for i in order] for order in orders]
            found = [best_cuts(self._rough, self._goal, self._network, row, bound) for row in rows]
            self._clusters[key] = max((c for c in found if c is not None), key=self._score, default=None)
        return self._clusters[key]

    def _score(self, *clusters: Cluster) -> float:
        return totals(self._goal, self._network, self._by_name, clusters).score

    def _partitions(self) -> Iterator[tuple[int, ...]]:
        """Every combination of clusters without a common provider."""
        most = self._goal.max_clusters or len(self._providers)
        by_lowest: Mapping[int, list[int]] = {
            i: [m for m in self._sets if m & -m == 1 << i] for i in range(len(self._providers))
        }
        all_free = (1 << len(self._providers)) - 1

        def extended(chosen: tuple[int, ...], free: int, lowest: int) -> Iterator[tuple[int, ...]]:
            if chosen:
                yield chosen
            if len(chosen) == most:
                return
            for i in range(lowest, len(self._providers)):
                for members in by_lowest[i]:
                    if members & ~free == 0:
                        yield from extended((*chosen, members), free & ~members, i + 1)

        return extended((), all_free, 0)


def _members(partition: Sequence[int]) -> int:
    return sum(itertools.chain(partition))
