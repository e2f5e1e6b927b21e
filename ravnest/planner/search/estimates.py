"""Estimated rates of many orders at once, on a model with few places: a search compares thousands of them.

The tables of all providers are gathered for all orders of one length and gone through stage by stage. For a number in
flight, one way up to each place is kept: the one whose slowest stage and share of the way are the smallest. So an
estimate is the rate of cuts that exist, and at most the rate of the best ones.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ravnest.planner.cluster import EVENNESS
from ravnest.planner.line_arrays import Indices, LineArrays
from ravnest.planner.link_codecs import assumed_share
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.stage_arrays import FlightNumbers, Single, StageArrays

Orders = Indices
"""One order in each row, as positions of providers; shorter ones are filled up with -1."""

_CHUNK: Final = 1 << 18
"""Numbers computed at a time: they fit into the processor's cache."""

_HALVINGS: Final = 4

_TRIP_WEIGHT: Final = 1e-3
"""Weight of a shorter way where it makes nothing slower."""

_FASTEST_LINE: Final = 1e12


class Estimates:
    """Estimates for orders of these providers.

    With `fine`, orders whose round trip conflicts with their slowest stage are looked at more closely.
    """

    def __init__(
        self,
        model: ModelCosts,
        goal: Goal,
        network: Network,
        providers: Sequence[Provider],
        fine: bool = False,
    ) -> None:
        self.model, self.goal, self.providers = model, goal, providers
        self.fine = fine
        self.relay_cost = 0.0
        """Share of its rate that an order loses for every two neighbours that the coordinator relays between: the
        coordinator's line may be the limit of all clusters."""
        self._lines = LineArrays.of(network, providers)
        self._numbers = FlightNumbers.of(goal)
        self.stages = StageArrays(model, goal, network, providers, self._numbers, self._lines)
        self.line_speed = np.minimum(self._lines.slower_way, _FASTEST_LINE)
        """For each provider, the bytes per second that its line carries both ways."""
        self.speed = np.array([p.compute_speed for p in providers])

    @property
    def count(self) -> int:
        return len(self.providers)

    def limit_averaging(self, averaging_seconds: float) -> None:
        """Leaves out stages whose parameters take longer than this to pass their provider's line."""
        self.stages.limit_averaging(averaging_seconds)

    def rates(self, orders: Orders) -> tuple[Table, Orders]:
        """For each order its rate, less the cost of staleness, and the number in flight; 0 where nothing fits."""
        rates, numbers = np.zeros(len(orders)), np.ones(len(orders), dtype=np.int64)
        lengths = (orders >= 0).sum(axis=1)
        longest_first = np.argsort(-lengths, kind="stable")
        longest_first = longest_first[lengths[longest_first] <= self.model.max_stages]
        size = max(1, _CHUNK // len(self.model.places) ** 2)
        for start in range(0, len(longest_first), size):
            part = longest_first[start : start + size]
            rates[part], numbers[part] = self._rates(orders[part], lengths[part])
        rates[lengths > 1] *= EVENNESS
        if self.relay_cost:
            rates *= np.maximum(0.0, 1.0 - self.relay_cost * self.relays(orders))
        return rates, numbers

    def relays(self, orders: Orders) -> Orders:
        """For each order, the number of neighbours that the coordinator relays between."""
        one, other = orders[:, :-1], orders[:, 1:]
        count: Orders = (self._lines.relayed(one, other) & (other >= 0)).sum(axis=1)
        return count

    def _rates(self, orders: Orders, lengths: Orders) -> tuple[Table, Orders]:
        """The same for orders sorted by length, the longest first."""
        count, stages = len(orders), int(lengths[0])
        lines = []
        for k in range(1, stages):
            longer = orders[: np.count_nonzero(lengths > k)]
            lines.append(self._line_seconds(longer[:, k - 1], longer[:, k]))
        counts, worth = self._numbers.counts, self._numbers.worth
        rows = self.stages.rows(orders)
        chosen = np.zeros(count, dtype=np.int64)
        slowest, way = self._through(rows, lines, chosen, np.full(count, counts[-1]))
        score = self._score(slowest, way, chosen)
        if stages == 1 or len(counts) == 1:
            return score, counts[chosen].astype(np.int64)
        # The most fits with the fewest in flight: the number that would be enough then, if memory were no limit.
        with np.errstate(invalid="ignore"):
            enough = np.where(np.isfinite(slowest), way / slowest, 1.0)
        wanted = np.minimum(np.searchsorted(counts, enough - 1e-6), len(counts) - 1)
        possible = worth[0] * self.model.samples / slowest
        best, best_at = score, chosen
        open_ = np.flatnonzero(score > 0)
        while len(open_):
            at = wanted[open_]
            at_lines = _lines_of(lines, open_)
            slow, path = self._through(rows[open_], at_lines, at, counts[at])
            found = self._score(slow, path, at)
            better = found > best[open_]
            best[open_[better]], best_at[open_[better]] = found[better], at[better]
            # Memory is the limit: try fewer in flight, as long as they could still be better.
            wanted[open_] -= 1
            ahead = wanted[open_]
            could = np.minimum(possible[open_], self.model.samples * counts[np.maximum(ahead, 0)] / way[open_])
            open_ = open_[(ahead > 0) & (could > best[open_] * 1.001)]
        if self.fine:
            self._refine(rows, lines, best_at, best, possible)
        return best, counts[best_at].astype(np.int64)

    def _refine(
        self, rows: Orders, lines: Sequence[tuple[Single, Single]], chosen: Orders, best: Table, possible: Table
    ) -> None:
        """Raises the rates in `best` of orders that could be faster: the shortest way without a stage slower than a
        bound, which is found by halving."""
        open_ = np.flatnonzero((best > 0) & (best < 0.99 * possible))
        if not len(open_):
            return
        at, at_lines = chosen[open_], _lines_of(lines, open_)
        counts = self._numbers.counts[at]
        worth = self._numbers.worth[at] * self.model.samples
        low, high = self.model.samples * self._numbers.worth[0] / possible[open_], worth / best[open_]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            slow, way = self._through(rows[open_], at_lines, at, counts, middle)
            period = np.maximum(slow, way / counts)
            better = period < high
            high, low = np.where(better, period, high), np.where(period > middle, middle, low)
        best[open_] = worth / high

    def _score(self, slowest: Table, way: Table, chosen: Orders) -> Table:
        period = np.maximum(slowest, way / self._numbers.counts[chosen])
        score: Table = self._numbers.worth[chosen] * self.model.samples / period
        return score

    def _through(
        self,
        rows: Orders,
        lines: Sequence[tuple[Single, Single]],
        chosen: Orders,
        flying: Table,
        within: Table | None = None,
    ) -> tuple[Table, Table]:
        """The slowest stage and the way of each order, with the memory of the `chosen` numbers in flight.

        One way to each place is kept: the one with the smaller slowest stage and way over `flying`, or with `within`,
        the shortest way without a slower stage than that.
        """
        at, tables, compute = self.stages.offsets(chosen), self.stages.fitting, self.stages.compute
        weight = (1 / flying).astype(np.float32)[:, None, None]
        places = len(self.model.places)
        first = np.arange(len(rows) * places) * places
        slow: Single = tables[at + rows[:, 0], :, 0]
        way: Single = compute[rows[:, 0], :, 0]
        for k, (line, trip) in enumerate(lines, 1):
            # Orders with more stages come first; the others have ended.
            count = len(line)
            row = rows[:count, k]
            through = np.maximum(np.maximum(slow[:count], line)[:, None, :], tables[at[:count] + row])
            path = (way[:count] + trip)[:, None, :] + compute[row]
            if within is None:
                key = np.maximum(through, path * weight[:count])
                key += _TRIP_WEIGHT * path
            else:
                key = np.where(through <= within[:count, None, None], path, np.float32(np.inf))
            best = first[: count * places] + key.argmin(axis=2).ravel()
            slow[:count] = through.ravel()[best].reshape(count, places)
            way[:count] = path.ravel()[best].reshape(count, places)
        return slow[:, -1].astype(float), way[:, -1].astype(float)

    def _line_seconds(self, before: Orders, after: Orders) -> tuple[Single, Single]:
        """For pairs of neighbours, the seconds of their line at each place, and its part of the way."""
        there, there_latency = self._lines.between(before, after)
        back, back_latency = self._lines.between(after, before)
        forward, backward = self.model.carried(assumed_share(self.goal))
        forth = forward[None, :] / there[:, None]
        home = backward[None, :] / back[:, None]
        trip = forth + home + (there_latency + back_latency)[:, None]
        return np.maximum(forth, home).astype(np.float32), trip.astype(np.float32)


def _lines_of(lines: Sequence[tuple[Single, Single]], chosen: Orders) -> list[tuple[Single, Single]]:
    """The lines of the chosen orders, the longest of which come first."""
    found = []
    for line, trip in lines:
        longer = chosen[: np.searchsorted(chosen, len(line))]
        if not len(longer):
            break
        found.append((line[longer], trip[longer]))
    return found
