"""Clusters of neighbours in a sorted line of providers, chosen exactly.

In a line in which similar machines are neighbours, good clusters consist of neighbours. Every run of neighbours is
estimated once, all at the same time; dynamic programming then chooses the runs with the largest sum of rates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ravnest.planner.model_costs import Table
from ravnest.planner.problem import Provider
from ravnest.planner.search.estimates import Estimates, Orders

KEYS: Final = ("line", "speed", "both", "memory", "latency")
"""Keys to sort providers by."""


@dataclass(frozen=True)
class Runs:
    """The estimated rates of all runs of providers in a line."""

    orders: dict[int, Orders]
    """By the size of a run, one row for every start."""
    rates: dict[int, Table]

    @classmethod
    def of(cls, estimates: Estimates, line: Sequence[int], sizes: Sequence[int]) -> "Runs":
        orders: dict[int, Orders] = {}
        rates: dict[int, Table] = {}
        sorted_line = np.array(line)
        for size in sizes:
            if size <= len(line):
                windows = np.lib.stride_tricks.sliding_window_view(sorted_line, size)
                orders[size] = arranged(estimates, windows)
        if orders:
            most = max(orders)
            filled = [np.pad(o, ((0, 0), (0, most - size)), constant_values=-1) for size, o in orders.items()]
            found, _ = estimates.rates(np.concatenate(filled))
            ends = np.cumsum([len(o) for o in orders.values()])[:-1]
            rates = dict(zip(orders, np.split(found, ends), strict=True))
        return cls(orders, rates)

    def best(self, bonus: float, left_out: float) -> list[tuple[tuple[int, ...], float]]:
        """The orders with the largest sum of rates, and their rates, given a bonus for every cluster and a reward for
        every provider that is left out."""
        if not self.rates:
            return []
        sizes = np.array(sorted(self.rates))
        count = len(self.rates[int(sizes[0])]) + int(sizes[0]) - 1
        ending = np.full((count + 1, len(sizes)), -np.inf)
        for column, size in enumerate(sizes):
            rates = self.rates[int(size)]
            ending[size:, column] = np.where(rates > 0, rates + bonus, -np.inf)
        # Entries before the line stay at minus infinity: no run may start there.
        most = int(sizes[-1])
        best = np.full(count + 1 + most, -np.inf)
        best[most] = 0.0
        taken = np.zeros(count + 1, dtype=np.int64)
        for end in range(1, count + 1):
            values = best[most + end - sizes] + ending[end]
            column = int(values.argmax())
            without = best[most + end - 1] + left_out
            if values[column] > without:
                best[most + end], taken[end] = values[column], sizes[column]
            else:
                best[most + end] = without
        chosen = []
        end = count
        while end:
            size = int(taken[end])
            if size:
                start = end - size
                chosen.append((tuple(int(i) for i in self.orders[size][start]), float(self.rates[size][start])))
            end -= size or 1
        return chosen


def arranged(estimates: Estimates, groups: Orders) -> Orders:
    """Each group in an order that is mostly good: the slowest lines at both ends, which have half of the traffic."""
    if groups.shape[1] < 3:
        return np.array(groups)
    by_line = np.take_along_axis(groups, np.argsort(estimates.line_speed[groups], axis=1, kind="stable"), axis=1)
    return np.concatenate([by_line[:, ::2], by_line[:, 1::2][:, ::-1]], axis=1)


def sorted_line(providers: Sequence[Provider], key: str) -> list[int]:
    """The providers, as indices, sorted by one of KEYS, the best first."""

    def speed(p: Provider) -> float:
        return p.compute_speed

    def line(p: Provider) -> float:
        return min(p.up_bytes_per_second, p.down_bytes_per_second, 1e12)

    keys: dict[str, Callable[[Provider], tuple[float, float, str]]] = {
        "line": lambda p: (-line(p), -speed(p), p.name),
        "speed": lambda p: (-speed(p), -line(p), p.name),
        "both": lambda p: (-speed(p) * line(p) ** 0.5, 0.0, p.name),
        "memory": lambda p: (-p.memory_bytes, -speed(p), p.name),
        "latency": lambda p: (p.latency_seconds, -speed(p), p.name),
    }
    return sorted(range(len(providers)), key=lambda i: keys[key](providers[i]))
