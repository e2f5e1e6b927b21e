"""Best cuts of the model for providers in a given order, found exactly.

For a number of microbatches in flight, the rate of a set of cuts is limited by its slowest stage or line, and by that
number over the round trip. Both limits are met together: the cuts with the shortest round trip among those without a
stage slower than a bound, for the bound that gives the best rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.planner.cluster import Cluster, cluster_of, memory_bytes, stage_tables
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider


def best_cuts(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    order: Sequence[Provider],
    averaging_seconds: float = math.inf,
) -> Cluster | None:
    """The best cluster of this order; None if the model cannot be cut so that each stage fits.

    The best one has the highest rate times the worth of a sample; among equals, the fewest in flight. With
    `averaging_seconds`, no stage has more parameters than pass its provider's line in that time.
    """
    if not order or len(order) > model.max_stages:
        return None
    ways = Ways.of(model, goal, network, order, averaging_seconds)
    numbers = _numbers(goal, len(order))
    found = ways.fastest(numbers)
    if found is None:
        return None
    if goal.worth(found.in_flight) < 1 or found.period_seconds > ways.min_seconds(numbers[0]) * (1 + _CLOSE):
        # Memory, staleness and the length of the round trip conflict.
        found = ways.best_of_all(numbers, found)
    cluster = cluster_of(model, goal, network, order, found.cuts, found.in_flight)
    if len(order) == 1 or goal.in_flight is not None:
        return cluster
    # The choice of codecs may lengthen the round trip beyond the assumption, and so require more in flight; with more
    # in flight, the codecs may be more precise.
    for _ in range(_ROUNDS):
        enough = min(cluster.enough_in_flight, goal.max_in_flight)
        number = next((n for n in range(enough, 1, -1) if _fits(model, goal, order, found, n)), 1)
        if number == cluster.in_flight:
            break
        cluster = cluster_of(model, goal, network, order, found.cuts, number)
    return cluster


_CLOSE = 1e-9
_ROUNDS = 4
"""Maximum rounds until the number in flight and the codecs fit each other."""


def _fits(model: ModelCosts, goal: Goal, order: Sequence[Provider], found: "_CutsFound", in_flight: int) -> bool:
    """Whether every stage has the memory for this number in flight."""
    held, bounds = memory_bytes(model, goal, in_flight), (0, *found.cuts, model.last)
    return all(held[bounds[k], bounds[k + 1]] <= provider.memory_bytes for k, provider in enumerate(order))


def _numbers(goal: Goal, stages: int) -> range:
    """The numbers in flight to try."""
    if stages == 1:
        return range(1, 2)
    if goal.in_flight is not None:
        return range(goal.max_in_flight, goal.max_in_flight + 1)
    return range(1, goal.max_in_flight + 1)


@dataclass(frozen=True, slots=True)
class _CutsFound:
    cuts: tuple[int, ...]
    slowest_seconds: float
    round_trip_seconds: float
    in_flight: int

    @property
    def period_seconds(self) -> float:
        return max(self.slowest_seconds, self.round_trip_seconds / self.in_flight)


@dataclass(frozen=True, slots=True)
class Ways:
    """For each position of the order, the costs of a stage from place i to place j."""

    seconds: list[Table]
    trips: list[Table]
    model: ModelCosts
    goal: Goal
    order: Sequence[Provider]

    @classmethod
    def of(
        cls, model: ModelCosts, goal: Goal, network: Network, order: Sequence[Provider], averaging_seconds: float
    ) -> "Ways":
        around = (None, *order, None)
        tables = [
            stage_tables(model, goal, network, provider, around[k], around[k + 2]) for k, provider in enumerate(order)
        ]
        seconds = [np.where(model.legal, t.seconds, np.inf) for t in tables]
        if math.isfinite(averaging_seconds):
            owned = model.between(model.parameter_bytes)
            for number, provider in enumerate(order):
                line = min(provider.up_bytes_per_second, provider.down_bytes_per_second)
                seconds[number] = np.where(owned <= averaging_seconds * line, seconds[number], np.inf)
        return cls(seconds, [t.trip for t in tables], model, goal, order)

    def best_of_all(self, numbers: range, known: _CutsFound) -> _CutsFound:
        """The best cuts over all numbers in flight, and at least as good as `known`."""
        best = known
        for in_flight in numbers:
            seconds = self._fitting(in_flight)
            slowest, _ = cheapest_way(seconds, np.maximum)
            if not np.isfinite(slowest):
                # More in flight need more memory.
                break
            worth = self.goal.worth(in_flight)
            enough = worth / self._score(best) * (1 - _CLOSE)
            if slowest < enough and self._shortest_way(seconds) / in_flight < enough:
                found = self._best(seconds, slowest, in_flight, enough)
                if self._score(found) > self._score(best) * (1 + _CLOSE):
                    best = found
            if best.in_flight <= in_flight and best.period_seconds <= slowest * (1 + _CLOSE):
                # The slowest stage or line is the limit and cannot be faster: more in flight do not help.
                break
        return best

    def fastest(self, numbers: range) -> _CutsFound | None:
        """The cuts with the fastest slowest stage, and the number in flight that they need; None if nothing fits."""
        slowest = self.min_seconds(numbers[0])
        if not np.isfinite(slowest):
            return None
        way = self._quickest(self._fitting(numbers[0]), slowest, numbers[0]).round_trip_seconds
        enough = min(max(math.ceil(way / slowest - _CLOSE), numbers[0]), numbers[-1])
        return self.best(enough) or self.best(numbers[0])

    def min_seconds(self, in_flight: int) -> float:
        """The time of the slowest stage or line, for the cuts that make it fastest."""
        return cheapest_way(self._fitting(in_flight), np.maximum)[0]

    def best(self, in_flight: int) -> _CutsFound | None:
        """The cuts with the shortest period for this number in flight; None if no cuts fit into the memory."""
        seconds = self._fitting(in_flight)
        slowest, _ = cheapest_way(seconds, np.maximum)
        return self._best(seconds, slowest, in_flight, math.inf) if np.isfinite(slowest) else None

    def _best(self, seconds: list[Table], slowest: float, in_flight: int, below: float) -> _CutsFound:
        """The cuts with the shortest period, if it is below a bound; `seconds` has all stages that fit."""
        best = self._quickest(seconds, slowest, in_flight)
        if best.round_trip_seconds <= in_flight * best.slowest_seconds:
            return best
        # A slower bound may allow a shorter round trip: halve towards the bound at which the two limits meet.
        below = min(below, best.period_seconds)
        bounds = np.unique(np.concatenate([t[(t > slowest) & (t < below)] for t in seconds]))
        low, high = 0, len(bounds) - 1
        while low <= high:
            middle = (low + high) // 2
            found = self._quickest(seconds, float(bounds[middle]), in_flight)
            if found.period_seconds < best.period_seconds:
                best = found
            if found.round_trip_seconds > in_flight * bounds[middle]:
                low = middle + 1
            else:
                high = middle - 1
        return best

    def _shortest_way(self, seconds: list[Table]) -> float:
        """The shortest round trip of all cuts that fit."""
        ways = [np.where(np.isfinite(table), trip, np.inf) for table, trip in zip(seconds, self.trips, strict=True)]
        return cheapest_way(ways, np.add)[0]

    def _score(self, found: _CutsFound) -> float:
        return self.goal.worth(found.in_flight) / found.period_seconds

    def _fitting(self, in_flight: int) -> list[Table]:
        """Seconds of the stages that fit into the memory of their provider."""
        held = memory_bytes(self.model, self.goal, in_flight)
        return [
            np.where(held <= provider.memory_bytes, table, np.inf)
            for provider, table in zip(self.order, self.seconds, strict=True)
        ]

    def _quickest(self, seconds: list[Table], bound: float, in_flight: int) -> _CutsFound:
        """The cuts with the shortest round trip among those without a stage or line slower than the bound."""
        allowed = [np.where(table <= bound, trip, np.inf) for table, trip in zip(seconds, self.trips, strict=True)]
        way, cuts = cheapest_way(allowed, np.add)
        places = (0, *cuts, self.model.last)
        slowest = max(float(table[places[k], places[k + 1]]) for k, table in enumerate(seconds))
        return _CutsFound(cuts, slowest, way, in_flight)


def cheapest_way(tables: Sequence[Table], combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The cheapest way from the first place to the last, one table per step; `combine` (max or sum) joins costs."""
    best = tables[0][0]
    back = []
    for table in tables[1:]:
        through = combine(best[:, None], table)
        step = np.argmin(through, axis=0)
        back.append(step)
        best = through[step, np.arange(len(best))]
    place = len(best) - 1
    cuts = []
    for step in reversed(back):
        place = int(step[place])
        cuts.append(place)
    return float(best[-1]), tuple(reversed(cuts))
