"""The rates of many orders at once, on a model with few places: what a search looks at thousands of.

The same tables as for exact cuts, one for every provider, gathered for all orders of one length and gone through stage
by stage. For a number in flight, one way up to each place is kept: the one whose slowest stage and share of the way
are least: so an estimate is the rate of cuts that exist, and at most the rate of the best ones.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ravnest.planner.cluster import EVENNESS, memory_bytes, stage_tables
from ravnest.planner.link_codecs import assumed_share
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import RELAY_SECONDS, Goal, Line, Network, Provider

Orders = np.ndarray[Any, np.dtype[np.int64]]
"""One order in each row, as indices of providers."""

Single = np.ndarray[Any, np.dtype[np.float32]]
"""Half as large as a Table: in a search there are many."""

_NUMBERS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)
"""Numbers in flight that are looked at; between them little changes."""

_CHUNK: Final = 1 << 18
"""So many numbers at a time: what the processor's cache holds."""

_HALVINGS: Final = 4

_TRIP_WEIGHT: Final = 1e-3
"""How much a shorter way counts where it makes nothing slower."""


class Estimates:
    """Providers as tables, for stages that take no longer than `averaging_seconds` of their line to be averaged."""

    def __init__(
        self,
        model: ModelCosts,
        goal: Goal,
        network: Network,
        providers: Sequence[Provider],
        averaging_seconds: float = math.inf,
        fine: bool = False,
    ) -> None:
        """With `fine`, orders whose round trip stands against their slowest stage are looked at more closely."""
        self.fine = fine
        self.model, self.goal, self.network, self.providers = model, goal, network, providers
        self.count = len(providers)
        self.looked_at = 0
        """How many orders so far."""
        self.relay_cost = 0.0
        """The share of its rate that an order is taken to lose for every two neighbours that the coordinator passes
        frames on between: its line may be what all clusters wait for."""
        most = goal.max_in_flight
        self.numbers = (most,) if goal.in_flight is not None else tuple(sorted({min(n, most) for n in _NUMBERS}))
        self._worth = np.array([goal.worth(n) for n in self.numbers])
        self._number = np.array(self.numbers, dtype=float)
        self._up = np.array([p.up_bytes_per_second for p in providers])
        self._down = np.array([p.down_bytes_per_second for p in providers])
        self._latency = np.array([p.latency_seconds for p in providers])
        self._reachable = np.array([p.reachable for p in providers], dtype=bool)
        machines = {name: i for i, name in enumerate(dict.fromkeys(p.machine for p in providers))}
        self._machine = np.array([machines[p.machine] for p in providers])
        self._shared = len(machines) < self.count
        self._measured = _Measured(network, providers)
        self.line_speed = np.minimum(np.minimum(self._up, self._down), 1e12)
        """Of each provider: bytes a second both ways."""
        self.speed = np.array([p.compute_speed for p in providers])
        self._memory = np.array([p.memory_bytes for p in providers], dtype=float)
        seconds, compute = self._provider_tables()
        self._base, self._compute = seconds, compute
        # What fits, for one number in flight behind the other; filled in as it is asked for.
        self._fitting = np.empty((len(self.numbers) * len(seconds), *seconds.shape[1:]), dtype=np.float32)
        self.limit_averaging(averaging_seconds)

    def limit_averaging(self, averaging_seconds: float) -> None:
        """Leaves out stages whose parameters take longer than this to pass their provider's line."""
        self.averaging_seconds = averaging_seconds
        self._filled: set[int] = set()

    def rates(self, orders: Orders) -> tuple[Table, Orders]:
        """For each order its rate, less what staleness takes (0: nothing fits), and the number in flight.

        Orders may be of different lengths, filled up with -1.
        """
        rates, numbers = np.zeros(len(orders)), np.ones(len(orders), dtype=np.int64)
        self.looked_at += len(orders)
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
        """Between how many neighbours of each order the coordinator passes frames on."""
        one, other = orders[:, :-1], orders[:, 1:]
        relayed = ~(self._reachable[one] | self._reachable[other]) & (self._machine[one] != self._machine[other])
        count: Orders = (relayed & (other >= 0)).sum(axis=1)
        return count

    def own_seconds(self) -> Single:
        """For each provider, the least seconds of a stage by its start and its end, whoever its neighbours are."""
        tables = self._base.reshape(self.count, -1, *self._base.shape[1:])
        least: Single = tables.min(axis=1).transpose(0, 2, 1)
        return least

    def _rates(self, orders: Orders, lengths: Orders) -> tuple[Table, Orders]:
        """Of orders of which the longest come first."""
        count, stages = len(orders), int(lengths[0])
        lines = []
        for k in range(1, stages):
            longer = orders[: np.count_nonzero(lengths > k)]
            lines.append(self._lines(longer[:, k - 1], longer[:, k]))
        rows = self._rows(orders)
        chosen = np.zeros(count, dtype=np.int64)
        slowest, way = self._through(rows, lines, chosen, np.full(count, self._number[-1]))
        score = self._score(slowest, way, chosen)
        if stages == 1 or len(self.numbers) == 1:
            return score, self._number[chosen].astype(np.int64)
        # With the least in flight the most fits: how many are enough for that, if memory were no matter?
        with np.errstate(invalid="ignore"):
            enough = np.where(np.isfinite(slowest), way / slowest, 1.0)
        wanted = np.minimum(np.searchsorted(self._number, enough - 1e-6), len(self.numbers) - 1)
        possible = self._worth[0] * self.model.samples / slowest
        best, best_at = score, chosen
        open_ = np.flatnonzero(score > 0)
        while len(open_):
            at = wanted[open_]
            at_lines = _of(lines, open_)
            slow, path = self._through(rows[open_], at_lines, at, self._number[at])
            found = self._score(slow, path, at)
            better = found > best[open_]
            best[open_[better]], best_at[open_[better]] = found[better], at[better]
            # Memory stands against it: fewer in flight, as long as they could still be better.
            wanted[open_] -= 1
            ahead = wanted[open_]
            could = np.minimum(possible[open_], self.model.samples * self._number[np.maximum(ahead, 0)] / way[open_])
            open_ = open_[(ahead > 0) & (could > best[open_] * 1.001)]
        if self.fine:
            self._closer(rows, lines, best_at, best, possible)
        return best, self._number[best_at].astype(np.int64)

    def _closer(
        self, rows: Orders, lines: Sequence[tuple[Single, Single]], chosen: Orders, best: Table, possible: Table
    ) -> None:
        """Raises the rates of orders that could be faster: the shortest way without a stage slower than a bound, which
        is found by halving."""
        open_ = np.flatnonzero((best > 0) & (best < 0.99 * possible))
        if not len(open_):
            return
        at, at_lines = chosen[open_], _of(lines, open_)
        worth = self._worth[at] * self.model.samples
        low, high = self.model.samples * self._worth[0] / possible[open_], worth / best[open_]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            slow, way = self._through(rows[open_], at_lines, at, self._number[at], middle)
            period = np.maximum(slow, way / self._number[at])
            better = period < high
            high, low = np.where(better, period, high), np.where(period > middle, middle, low)
        best[open_] = worth / high

    def _score(self, slowest: Table, way: Table, chosen: Orders) -> Table:
        score: Table = self._worth[chosen] * self.model.samples / np.maximum(slowest, way / self._number[chosen])
        return score

    def _through(
        self,
        rows: Orders,
        lines: Sequence[tuple[Single, Single]],
        chosen: Orders,
        flying: Table,
        within: Table | None = None,
    ) -> tuple[Table, Table]:
        """The slowest stage and the way of each order, with the memory of a number in flight, by the kept way to each
        place: the better the less its slowest stage and its way over `flying`, or the shorter its way where no stage
        is slower than `within`."""
        for number in np.unique(chosen):
            self._fill(int(number))
        tables, at = self._fitting, chosen * len(self._base)
        weight = (1 / flying).astype(np.float32)[:, None, None]
        places = len(self.model.places)
        first = np.arange(len(rows) * places) * places
        slow: Single = tables[at + rows[:, 0], :, 0]
        way: Single = self._compute[rows[:, 0], :, 0]
        for k, (line, trip) in enumerate(lines, 1):
            # Those with so many stages come first; the others have come to their end.
            count = len(line)
            row = rows[:count, k]
            through = np.maximum(np.maximum(slow[:count], line)[:, None, :], tables[at[:count] + row])
            path = (way[:count] + trip)[:, None, :] + self._compute[row]
            if within is None:
                key = np.maximum(through, path * weight[:count])
                key += _TRIP_WEIGHT * path
            else:
                key = np.where(through <= within[:count, None, None], path, np.float32(np.inf))
            best = first[: count * places] + key.argmin(axis=2).ravel()
            slow[:count] = through.ravel()[best].reshape(count, places)
            way[:count] = path.ravel()[best].reshape(count, places)
        return slow[:, -1].astype(float), way[:, -1].astype(float)

    def _fill(self, number: int) -> None:
        """Seconds of the stages that fit with so many in flight."""
        if number in self._filled:
            return
        held = memory_bytes(self.model, self.goal, self.numbers[number]).T
        fits = held[None] <= self._memory[:, None, None]
        if math.isfinite(self.averaging_seconds):
            owned = self.model.between(self.model.parameter_bytes).T
            most = self.averaging_seconds * np.minimum(self._up, self._down)
            fits &= owned[None] <= most[:, None, None]
        fits = np.repeat(fits, len(self._base) // self.count, axis=0)
        rows = slice(number * len(self._base), (number + 1) * len(self._base))
        self._fitting[rows] = np.where(fits, self._base, np.float32(np.inf))
        self._filled.add(number)

    def _provider_tables(
        self,
    ) -> tuple[Single, Single]:
        """For each provider, seconds of a stage by its end and its start; where hosts are shared, four: with the stage
        before, and the one after, on another machine or on its own."""
        seconds, compute = [], []
        for provider in self.providers:
            other = replace(provider, name=f"{provider.name} ", host="", up_bytes_per_second=math.inf)
            other = replace(other, down_bytes_per_second=math.inf, reachable=True)
            for variant in range(4) if self._shared else (3,):
                before, after = (other if variant & 2 else provider), (other if variant & 1 else provider)
                tables = stage_tables(self.model, self.goal, self.network, provider, before, after)
                seconds.append(np.where(self.model.legal, tables.seconds, np.inf).T.astype(np.float32))
                compute.append(tables.compute.T.astype(np.float32))
        return np.stack(seconds), np.stack(compute)

    def _rows(self, orders: Orders) -> Orders:
        """Which table each position of each order has."""
        if not self._shared:
            return orders
        machine = self._machine[orders]
        apart = ((machine[:, 1:] != machine[:, :-1]) & (orders[:, 1:] >= 0)).astype(np.int64)
        rows = orders * 4
        rows[:, 1:] += 2 * apart
        rows[:, :-1] += apart
        return rows

    def _lines(self, before: Orders, after: Orders) -> tuple[Single, Single]:
        """For pairs of neighbours, the seconds at each place, and the part of the way."""
        there, there_latency = self._line(before, after)
        back, back_latency = self._line(after, before)
        forward, backward = self.model.carried(assumed_share(self.goal))
        forth = forward[None, :] / there[:, None]
        home = backward[None, :] / back[:, None]
        trip = forth + home + (there_latency + back_latency)[:, None]
        return np.maximum(forth, home).astype(np.float32), trip.astype(np.float32)

    def _line(self, sender: Orders, receiver: Orders) -> tuple[Table, Table]:
        """What `Network.line` gives, for many pairs."""
        rate = np.minimum(self._up[sender], self._down[receiver])
        latency = self._latency[sender] + self._latency[receiver]
        requester = self.network.requester
        relay = min(requester.up_bytes_per_second, requester.down_bytes_per_second)
        relayed = ~(self._reachable[sender] | self._reachable[receiver])
        rate = np.where(relayed, np.minimum(rate, relay), rate)
        latency = np.where(relayed, latency + RELAY_SECONDS, latency)
        rate, latency = self._measured.replace(sender, receiver, rate, latency)
        same = self._machine[sender] == self._machine[receiver]
        return np.where(same, np.inf, rate), np.where(same, 0.0, latency)


def _of(lines: Sequence[tuple[Single, Single]], chosen: Orders) -> list[tuple[Single, Single]]:
    """The lines of some orders, of which the longest come first."""
    found = []
    for line, trip in lines:
        longer = chosen[: np.searchsorted(chosen, len(line))]
        if not len(longer):
            break
        found.append((line[longer], trip[longer]))
    return found


class _Measured:
    """The measured lines, looked up for many pairs at once."""

    def __init__(self, network: Network, providers: Sequence[Provider]) -> None:
        index = {p.name: i for i, p in enumerate(providers)}
        found: list[tuple[int, Line]] = sorted(
            (
                (index[a] * len(providers) + index[b], line)
                for (a, b), line in network.measured.items()
                if a in index and b in index
            ),
            key=lambda pair: pair[0],
        )
        self._count = len(providers)
        self._keys = np.array([key for key, _ in found], dtype=np.int64)
        self._rates = np.array([line.bytes_per_second for _, line in found])
        self._latencies = np.array([line.latency_seconds for _, line in found])

    def replace(self, sender: Orders, receiver: Orders, rate: Table, latency: Table) -> tuple[Table, Table]:
        if not len(self._keys):
            return rate, latency
        keys = sender * self._count + receiver
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[at] == keys
        return np.where(known, self._rates[at], rate), np.where(known, self._latencies[at], latency)
