"""Even cuts: of the cuts that are about as fast as the best, those that a person would make.

A search compares rates alone. If the rate does not depend on the cuts, because a line or the cores of a shared host are
the limit, it may put nearly the whole model on one machine, or cut a block apart for nothing. Within a small share of
the score, this step decides in this order:

1. the fullest stage takes as small a share of its machine's memory as possible, while the slowest stage or line stays
   within two fifths of the fastest possible, also where shared cores or a line hide that;
2. of the cuts about as even, the slowest stage or line is about as fast as possible;
3. of these, the fewest bytes cross the links, and boundaries between modules come before places inside of them;
4. of these, the other stages are even too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.planner.cluster import EVENNESS, Cluster, cluster_of, memory_bytes
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.search.cuts import Ways, cheapest_way
from ravnest.planner.search.objective import score
from ravnest.planner.search.refine_cuts import few_places

TOLERANCE: Final = 0.02
"""Share of the score, and of the rate of each cluster, that even cuts may cost."""

ABOUT_EQUAL: Final = 0.05
"""Two fullest stages, or two slowest ones, are about equal if they differ by at most this share."""

WORK_SLACK: Final = 1.4
"""Factor on the time of the slowest stage or line with the fastest cuts, which even memory may cost where something
else limits the rate. With it, four stages of GPT-2 on two cores have memory as even as without any bound
(benchmarks/history/2026-11-19-06-cuts.md)."""

_EVENNESS_PRICE: Final = 1e-3
"""Weight of the other stages' evenness against the bytes that cross a cut: it decides only between equals."""

_HALVINGS: Final = 6
"""Steps of the bisection for the smallest fill: it is found within 2 % of the memory."""

_TRIP_WEIGHTS: Final = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Weights of the round trip against the bytes, tried in turn until the cluster is fast enough."""

_ALL_PLACES: Final = 6
"""Clusters up to which all places of the model are looked at; for more, few, and those near the cuts."""
_NEAR: Final = 16

Judge = Callable[[Cluster], bool]


def fill(cluster: Cluster, providers: Mapping[str, Provider]) -> float:
    """Share of its provider's memory that the fullest stage takes."""
    return max(stage.memory_bytes / providers[stage.provider].memory_bytes for stage in cluster.stages)


def is_about_as_good(score_now: float, score_before: float) -> bool:
    """Whether one score is within the tolerance of another."""
    return score_now >= (1 - TOLERANCE) * score_before


def with_even_cuts(
    model: ModelCosts, goal: Goal, network: Network, providers: Mapping[str, Provider], found: Proposal
) -> Proposal:
    """The proposal with the same providers in the same order, and as many microbatches in flight, but even cuts."""
    if len(found.clusters) == 1:
        # A cluster that trains alone keeps nothing for averaging.
        goal = replace(goal, max_clusters=1)
    evener = _Evener(model, goal, network, providers, _line_seconds(providers, found), len(found.clusters))
    clusters = list(found.clusters)
    for number, cluster in enumerate(found.clusters):

        def is_good(tried: Cluster, number: int = number, before: Cluster = cluster) -> bool:
            if not found.limit:
                # The clusters share no limit, so that each is judged by itself.
                return is_about_as_good(score(goal, tried), score(goal, before))
            others = [*clusters[:number], tried, *clusters[number + 1 :]]
            return _is_about_as_good(proposal_of(goal, network, providers, others), found)

        if len(cluster.stages) > 1:
            clusters[number] = evener.evened(cluster, found.rates[number], is_good)
    evened = proposal_of(goal, network, providers, clusters)
    return evened if _is_about_as_good(evened, found) else found


@dataclass(frozen=True, slots=True)
class _Evener:
    """The step for the clusters of one proposal."""

    model: ModelCosts
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]
    line_seconds: float
    """Time within which the parameters of a stage pass its provider's line."""
    clusters: int

    def evened(self, cluster: Cluster, rate: float, is_good: Judge) -> Cluster:
        """The cluster with the preferred cuts that are good; `rate` is what it reaches while the others train too."""
        model, flying = self._places_for(cluster), cluster.in_flight
        order = [self.providers[name] for name in cluster.providers]
        ways = Ways.of(model, self.goal, self.network, order, self.line_seconds)
        held = memory_bytes(model, self.goal, flying)
        longest = EVENNESS * model.samples / ((1 - TOLERANCE) * rate)
        options = _Options(model, ways, [held / each.memory_bytes for each in order], longest)
        options = replace(options, longest_seconds=min(longest, WORK_SLACK * options.fastest(1.0)))

        def made(cuts: Sequence[int] | None) -> Cluster | None:
            if cuts is None:
                return None
            tried = cluster_of(model, self.goal, self.network, order, cuts, flying)
            return tried if is_good(tried) else None

        best, least = self._evenest(cluster, options, made)
        fullest = min(1.0, (1 + ABOUT_EQUAL) * least)
        slowest = min(longest, (1 + ABOUT_EQUAL) * options.fastest(fullest))
        for weight in _TRIP_WEIGHTS:
            cheap = made(options.cheapest(fullest, slowest, weight))
            if cheap is not None:
                return cheap
        return best

    def _evenest(
        self, cluster: Cluster, options: "_Options", made: Callable[[Sequence[int] | None], Cluster | None]
    ) -> tuple[Cluster, float]:
        """The good cluster with the smallest fill that is found, and its fill."""
        best, high, low = cluster, fill(cluster, self.providers), options.min_fill()
        middle = low * (1 + 1e-9)
        for _ in range(_HALVINGS):
            tried = made(options.quickest(middle)) if middle < high else None
            if tried is not None:
                best, high = tried, fill(tried, self.providers)
            else:
                low = middle
            if high <= low * (1 + 1e-6):
                break
            middle = (low + high) / 2
        return best, high

    def _places_for(self, cluster: Cluster) -> ModelCosts:
        """The model with the places at which this cluster may be cut."""
        model = self.model
        rough = few_places(model)
        if self.clusters <= _ALL_PLACES or rough is model:
            return model
        index = {place: i for i, place in enumerate(model.places)}
        kept = {index[place] for place in rough.places}
        for stage in cluster.stages[1:]:
            at = index[stage.start]
            kept.update(range(max(1, at - _NEAR), min(at + _NEAR + 1, model.last)))
        return model.at(sorted(kept))


@dataclass(frozen=True, slots=True)
class _Options:
    """The cuts of one cluster: for each position of its order, the figures of a stage from place i to place j."""

    model: ModelCosts
    ways: Ways
    fills: list[Table]
    """Share of its machine's memory that the stage takes."""
    longest_seconds: float
    """A slower stage or line would make the cluster too slow."""

    def min_fill(self) -> float:
        """The smallest fill of cuts without a stage that is too slow."""
        slow = [seconds > self.longest_seconds for seconds in self.ways.seconds]
        return cheapest_way([np.where(s, np.inf, f) for s, f in zip(slow, self.fills, strict=True)], np.maximum)[0]

    def fastest(self, fullest: float) -> float:
        """The time of the slowest stage or line, for the cuts that make it fastest with at most this fill."""
        return cheapest_way(self._within(self.ways.seconds, fullest, self.longest_seconds), np.maximum)[0]

    def quickest(self, fullest: float) -> tuple[int, ...] | None:
        """The cuts with the shortest round trip that keep to this fill; None if there are none."""
        return _cuts(self._within(self.ways.trips, fullest, self.longest_seconds))

    def cheapest(self, fullest: float, slowest: float, trip_weight: float) -> tuple[int, ...] | None:
        """The cuts with the least traffic, among equals the most even ones, that keep to this fill and time; with a
        `trip_weight`, a short round trip counts too."""
        model = self.model
        price = model.crossing_price[:, None] + model.fed_bytes
        usual = float(np.median(model.crossing_price[1:-1])) or 1.0
        trip_price = trip_weight * usual / max(1e-12, float(np.mean([trip[0, -1] for trip in self.ways.trips])))
        tables = []
        for fills, seconds, trips in zip(self.fills, self.ways.seconds, self.ways.trips, strict=True):
            fits = (fills <= fullest) & (seconds <= slowest)
            # Sums of squares are smallest where all are equal.
            uneven = np.where(fits, (fills / fullest) ** 2 + (seconds / slowest) ** 2, np.inf)
            tables.append(price + _EVENNESS_PRICE * usual * uneven + trip_price * trips)
        return _cuts(tables)

    def _within(self, tables: Sequence[Table], fullest: float, slowest: float) -> list[Table]:
        """The tables, infinite for stages that are fuller or slower than this."""
        return [
            np.where((fills <= fullest) & (seconds <= slowest), table, np.inf)
            for table, fills, seconds in zip(tables, self.fills, self.ways.seconds, strict=True)
        ]


def _cuts(tables: Sequence[Table]) -> tuple[int, ...] | None:
    """The cuts with the smallest sum; None if all sums are infinite."""
    cost, cuts = cheapest_way(tables, np.add)
    return cuts if math.isfinite(cost) else None


def _line_seconds(providers: Mapping[str, Provider], found: Proposal) -> float:
    """The longest time in which the parameters of a stage pass its provider's line, which bounds a round of averaging;
    infinite without averaging."""
    if len(found.clusters) == 1:
        return math.inf
    lines = {name: min(p.up_bytes_per_second, p.down_bytes_per_second) for name, p in providers.items()}
    slowest = max(s.parameter_bytes / lines[s.provider] for cluster in found.clusters for s in cluster.stages)
    return slowest * (1 + 1e-9)


def _is_about_as_good(tried: Proposal, found: Proposal) -> bool:
    rates = zip(tried.rates, found.rates, strict=True)
    return is_about_as_good(tried.score, found.score) and all(is_about_as_good(rate, before) for rate, before in rates)
