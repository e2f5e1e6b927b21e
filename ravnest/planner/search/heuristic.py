"""Heuristic search over the clusters of many providers: several groupings, the best of which local search improves.

Bounds on the averaging time, and keys to sort providers by, are tried on a sample of the providers; the best ones are
then used for all of them. Budgets are counted in estimates, so that a seed gives the same plan on any machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster, memory_bytes
from ravnest.planner.link_codecs import assumed_share
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.exact import GroupingCutter
from ravnest.planner.search.fixed_count import group_fixed_count
from ravnest.planner.search.genetic import evolve, regroup
from ravnest.planner.search.local_search import Grouping, Improver, Rules, padded
from ravnest.planner.search.objective import averaging_bounds, cluster_bonus, score_of
from ravnest.planner.search.order import best_order, coarse
from ravnest.planner.search.runs import KEYS, Runs, sorted_line

_SAMPLE: Final = 64
"""Providers on which bounds and sort keys are tried."""

_BOUNDS: Final = 9
_PROMISING: Final = 3
_FACTOR: Final = 0.7
"""Factor by which a bound is changed."""
_TRIES: Final = 5
_SAMPLE_BUDGET: Final = 1500
_ALONE: Final = 2000
"""Maximum number of providers that are considered for a cluster that trains alone: the best of all."""
_ONE_CLUSTER: Final = 20
"""Providers up to which the order of a cluster of all of them is searched for by itself."""
_RELAY_COSTS: Final = (0.0, 0.3, 1.0)
"""Shares of its rate that a cluster is assumed to lose for a relay; the best one is chosen."""
_GENETIC: Final = 200
"""Providers up to which the genetic search is used: for more, it brings nothing within the budget."""
_STEPS: Final = 14
"""Halvings in the search for the bonus that leaves out enough providers, or makes few enough clusters."""


class ManyProviders:
    """The search for clusters of many providers. `go_on` tells whether there is time left."""

    def __init__(
        self,
        model: ModelCosts,
        goal: Goal,
        network: Network,
        providers: Sequence[Provider],
        seed: int,
        go_on: Callable[[], bool] | None,
    ) -> None:
        self._model, self._goal, self._network, self._providers = model, goal, network, providers
        self._rng = np.random.default_rng(seed)
        self._go_on = go_on
        self._sizes = _sizes(model, goal, providers)
        self._rough = coarse(model, 0, 25 if len(providers) <= 50 else 21 if len(providers) <= 300 else 17)
        if self._rough.max_stages < self._sizes[-1 if goal.min_providers else 0]:
            self._rough = coarse(model, self._sizes[-1])
        self._cutter = GroupingCutter(model, goal, network, providers)
        self._slowed = self._cutter.slowed
        self._estimates = Estimates(self._rough, goal, network, self._slowed)
        forward, backward = model.carried(assumed_share(goal))
        crossing = (forward + backward)[1:-1]
        self._crossing_bytes = float(np.median(crossing)) if len(crossing) else 0.0
        self._fed_bytes = float(sum(model.input_bytes))

    def best(self, standbys: int, allowed: Callable[[Sequence[Cluster]], bool] | None = None) -> tuple[Cluster, ...]:
        """The best allowed clusters found that leave at least `standbys` providers without a stage; none if none was
        found."""
        budget = _budget(len(self._providers))
        if self._goal.min_clusters > 1:
            return self._cutter.best(self._fixed_count(standbys, budget), allowed)
        groupings = [self._one_cluster(standbys, budget // 8)]
        if self._goal.max_clusters != 1:
            groupings.append(self._several(standbys, budget))
        finished = [(bound, self._reordered(grouping, bound)) for bound, grouping in groupings]
        best = self._cutter.best(finished, allowed)
        if self._sizes[0] == len(self._providers) <= _ONE_CLUSTER:
            # All providers get a stage: only their order is to be found.
            whole = best_order(self._model, self._goal, self._network, self._providers)
            best = max(best, (whole,) if whole is not None else (), key=self._cutter.score)
        return best

    def _fixed_count(self, standbys: int, budget: int) -> list[tuple[float, Grouping]]:
        """Groupings into the requested number of clusters, each with the bound on averaging that it keeps to."""
        goal, found = self._goal, []
        bounds = [math.inf, *averaging_bounds(self._model, self._providers, _BOUNDS)]
        for bound in dict.fromkeys(bounds):
            self._estimates.limit_averaging(bound)
            most = budget // len(bounds)

            def go_on(looked_at: int, most: int = most) -> bool:
                return looked_at < most and (self._go_on is None or self._go_on())

            grouping = group_fixed_count(
                self._estimates, self._rng, self._sizes, goal.min_clusters, goal.min_providers, standbys, go_on
            )
            if grouping is not None:
                found.append((bound, self._reordered(grouping, bound)))
        if not goal.min_providers:
            # The search with this as a maximum may also end at this number.
            bound, grouping = self._several(standbys, budget)
            found.append((bound, self._reordered(grouping, bound)))
        return found

    def _several(self, standbys: int, budget: int) -> tuple[float, Grouping]:
        """The best grouping found, and the bound on averaging that it keeps to."""
        found: list[tuple[float, float, Grouping]] = []
        for bound, key in self._tried_out(standbys):
            self._estimates.limit_averaging(bound)
            grouping = self._grouped(self._estimates, key, bound, standbys)
            found.append((self._score(grouping, bound), bound, grouping))
        _, bound, grouping = max(found, key=lambda one: one[0])
        grouping = self._better(grouping, bound, standbys, int(0.3 * budget))
        return self._other_bounds(grouping, bound, standbys, int(0.7 * budget))

    def _one_cluster(self, standbys: int, budget: int) -> tuple[float, Grouping]:
        """The best cluster found that trains alone, and so does not average."""
        self._estimates.limit_averaging(math.inf)
        found = []
        for key in KEYS[:2] if len(self._providers) > 1000 else KEYS:
            line = sorted_line(self._providers, key)
            runs = Runs.of(self._estimates, line[:_ALONE], self._sizes)
            tops = [(float(rates.max()), size, int(rates.argmax())) for size, rates in runs.rates.items()]
            rate, size, start = max(tops, default=(0.0, 0, 0))
            if rate:
                found.append((rate, tuple(int(i) for i in runs.orders[size][start])))
        if not found:
            return math.inf, Grouping([], [], list(range(len(self._providers))))
        improver = Improver(self._estimates, self._rng)
        better = []
        for number, (rate, order) in enumerate(sorted(found, reverse=True)[:3], 1):
            free = sorted(set(range(len(self._providers))).difference(order))
            grouping = Grouping([order], [rate], free)
            rules = replace(self._rules(grouping, math.inf, standbys, len(self._providers)), max_clusters=1)

            def go_on(most: int = number * budget // 3) -> bool:
                return improver.looked_at < most and (self._go_on is None or self._go_on())

            better.append(improver.improved(grouping, rules, go_on, proposals=100))
        return math.inf, max(better, key=lambda grouping: grouping.together)

    def _reordered(self, grouping: Grouping, bound: float) -> Grouping:
        """The same clusters in better orders, by fine estimates."""
        self._estimates.limit_averaging(bound)
        self._estimates.fine = True
        found = Improver(self._estimates, self._rng).reordered(grouping)
        self._estimates.fine = False
        return found

    def _other_bounds(self, grouping: Grouping, bound: float, standbys: int, budget: int) -> tuple[float, Grouping]:
        """The grouping improved within longer and shorter bounds on averaging, as long as its score rises."""
        best, best_score = (bound, grouping), self._score(grouping, bound)
        if not math.isfinite(bound):
            return bound, self._better(grouping, bound, standbys, budget)
        factor, tries = _FACTOR, 0
        part = budget // _TRIES
        while tries < _TRIES and (self._go_on is None or self._go_on()):
            for change in (factor, 1 / factor):
                went = False
                while tries < _TRIES and (self._go_on is None or self._go_on()):
                    tries += 1
                    other = best[0] * change
                    changed = self._better(self._rebounded(best[1], other, standbys), other, standbys, part)
                    score = self._score(changed, other)
                    if score <= best_score * (1 + 1e-6):
                        break
                    best, best_score, went = (other, changed), score, True
                if went:
                    break
            factor = math.sqrt(factor)
        return best

    def _rebounded(self, grouping: Grouping, bound: float, standbys: int) -> Grouping:
        """The same grouping within another bound, with new clusters in place of those that cannot keep to it."""
        self._estimates.limit_averaging(bound)
        improver = Improver(self._estimates, self._rng)
        rates = improver.rates(grouping.orders)
        kept = [i for i, rate in enumerate(rates) if rate > 0]
        gone = [p for i, rate in enumerate(rates) if not rate for p in grouping.orders[i]]
        again = Grouping([grouping.orders[i] for i in kept], [rates[i] for i in kept], sorted([*grouping.free, *gone]))
        if gone:
            regroup(improver, again, self._rules(grouping, bound, standbys, self._estimates.count))
        return again

    def _tried_out(self, standbys: int) -> list[tuple[float, str]]:
        """Bounds on averaging and keys to sort by, the most promising first."""
        step = max(1, round(len(self._providers) / _SAMPLE))
        sample = [self._slowed[i] for i in sorted_line(self._providers, "both")[step // 2 :: step]]
        estimates = Estimates(self._rough, self._goal, self._network, sample)
        share = standbys // step
        bounds = averaging_bounds(self._model, self._providers, _BOUNDS)
        scored: dict[float, float] = {}
        for bound in bounds:
            estimates.limit_averaging(bound)
            scored[bound] = self._score(self._grouped(estimates, "both", bound, share), bound, estimates, step)
        promising = sorted(bounds, key=lambda b: -scored[b])[:_PROMISING]

        def improved(bound: float) -> float:
            """The score after local search: groupings that start equally good do not stay so."""
            estimates.limit_averaging(bound)
            grouping = self._grouped(estimates, "both", bound, share)
            return self._score(
                self._improved(estimates, grouping, bound, share, _SAMPLE_BUDGET), bound, estimates, step
            )

        if self._relays_matter:
            by_cost: dict[float, float] = {}
            for cost in _RELAY_COSTS:
                estimates.relay_cost = cost
                by_cost[cost] = improved(promising[0])
            estimates.relay_cost = max(_RELAY_COSTS, key=lambda cost: by_cost[cost])
        self._estimates.relay_cost = estimates.relay_cost
        by_bound = {bound: improved(bound) for bound in promising}
        best = max(promising, key=lambda b: by_bound[b])
        estimates.limit_averaging(best)
        by_key = {key: self._score(self._grouped(estimates, key, best, share), best, estimates, step) for key in KEYS}
        return [(best, key) for key in sorted(KEYS, key=lambda k: -by_key[k])[:2]]

    @property
    def _relays_matter(self) -> bool:
        requester = self._network.requester
        limited = math.isfinite(min(requester.up_bytes_per_second, requester.down_bytes_per_second))
        return limited and sum(not p.reachable for p in self._providers) > 1

    def _grouped(self, estimates: Estimates, key: str, bound: float, standbys: int) -> Grouping:
        """Clusters of neighbours in a sorted line."""
        runs = Runs.of(estimates, sorted_line(estimates.providers, key), self._sizes)
        most = self._goal.max_clusters or len(estimates.providers)
        all_free = set(range(estimates.count))
        bonus = 0.0
        grouping = Grouping([], [], sorted(all_free))
        for _ in range(3):
            chosen = _within(runs, bonus, standbys, most, estimates.count)
            orders = [order for order, _ in chosen]
            grouping = Grouping(orders, [rate for _, rate in chosen], sorted(all_free.difference(*orders)))
            again = cluster_bonus(self._goal, self._model.samples, grouping.together, len(orders), bound)
            if abs(again - bonus) <= 0.02 * again:
                break
            bonus = again
        return grouping

    def _better(self, grouping: Grouping, bound: float, standbys: int, budget: int) -> Grouping:
        self._estimates.limit_averaging(bound)
        return self._improved(self._estimates, grouping, bound, standbys, budget)

    def _improved(self, estimates: Estimates, grouping: Grouping, bound: float, standbys: int, budget: int) -> Grouping:
        """The grouping after local and genetic search, within a budget of estimates."""
        improver = Improver(estimates, self._rng)
        rules = self._rules(grouping, bound, standbys, estimates.count)

        def go_on() -> bool:
            return improver.looked_at < budget and (self._go_on is None or self._go_on())

        better = improver.improved(grouping, rules, go_on)
        if estimates.count <= _GENETIC:
            better = evolve(improver, better, rules, go_on)
        return better

    def _rules(self, grouping: Grouping, bound: float, standbys: int, count: int) -> Rules:
        return Rules(
            min_stages=self._sizes[0],
            max_stages=self._sizes[-1],
            max_clusters=self._goal.max_clusters or count,
            standbys=standbys,
            bonus=cluster_bonus(self._goal, self._model.samples, grouping.together, len(grouping.orders), bound),
        )

    def _score(self, grouping: Grouping, bound: float, estimates: Estimates | None = None, share_of: int = 1) -> float:
        """The estimated score; that of a sample as if each of its clusters existed `share_of` times."""
        if not grouping.orders:
            return 0.0
        estimates = estimates or self._estimates
        relays = estimates.relays(padded(grouping.orders))
        rates = np.array(grouping.rates) / np.maximum(1e-9, 1.0 - estimates.relay_cost * relays)
        traffic = self._fed_bytes + relays * self._crossing_bytes
        requester = self._network.requester
        load = float((rates * traffic).sum()) * share_of / self._model.samples / requester.up_bytes_per_second
        together, count = np.array(rates.sum() / max(1.0, load)), np.array(float(len(rates)))
        return float(score_of(self._goal, self._model.samples, together, count, bound))


def _within(
    runs: Runs, bonus: float, standbys: int, max_clusters: int, count: int
) -> list[tuple[tuple[int, ...], float]]:
    """The best runs that leave out enough providers and are few enough: halving finds the rewards for both."""
    chosen = runs.best(bonus, 0.0)

    def left_out(found: list[tuple[tuple[int, ...], float]]) -> int:
        return count - sum(len(order) for order, _ in found)

    top = max((rate for _, rate in chosen), default=0.0) + bonus
    if len(chosen) > max_clusters:
        low, high = 0.0, top
        for _ in range(_STEPS):
            middle = (low + high) / 2
            fewer = runs.best(bonus - middle, 0.0)
            low, high = (middle, high) if len(fewer) > max_clusters else (low, middle)
            chosen = fewer if 0 < len(fewer) <= max_clusters else chosen
        chosen = sorted(chosen, key=lambda one: -one[1])[:max_clusters]
    if chosen and left_out(chosen) < standbys:
        low, high = 0.0, top
        for _ in range(_STEPS):
            middle = (low + high) / 2
            fewer = runs.best(bonus, middle)
            enough = left_out(fewer) >= standbys
            low, high = (low, middle) if enough else (middle, high)
            chosen = fewer if enough and fewer else chosen
        while chosen and left_out(chosen) < standbys:
            chosen.remove(min(chosen, key=lambda one: one[1]))
    return chosen


def _sizes(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> list[int]:
    """The numbers of stages that a cluster may have: as many as the model needs, and some more."""
    memory = float(np.median([p.memory_bytes for p in providers]))
    held = float(memory_bytes(model, goal, 3 if goal.in_flight is None else goal.in_flight)[0, :].max())
    needed = math.ceil(held / memory)
    most = max(8, 2 * needed + 2, goal.min_stages)
    if goal.max_clusters is not None:
        most = max(most, min(32, math.ceil(len(providers) / goal.max_clusters)))
    if goal.min_providers:
        most = goal.min_providers - (goal.min_clusters - 1) * goal.min_stages
    most = min(most, model.max_stages, len(providers))
    return list(range(min(goal.min_stages, most), most + 1))


def _budget(count: int) -> int:
    """Number of estimates for local search that fits into the time allowed for this number of providers."""
    return int(np.interp(count, [9, 100, 1000, 10_000], [25_000, 40_000, 400_000, 2_400_000]))
