"""Groupings of many providers into a fixed number of clusters, which the requester asked for.

A sorted line of providers is cut into this number of clusters of neighbours, or dealt out so that every cluster gets
some of each kind; local search improves the best of these without a change of the number.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.local_search import Grouping, Improver, Order, Rules
from ravnest.planner.search.runs import KEYS, Runs, arranged, sorted_line

_IMPROVED: Final = 2
"""Groupings that local search improves."""


def group_fixed_count(
    estimates: Estimates,
    rng: np.random.Generator,
    sizes: Sequence[int],
    clusters: int,
    providers: int,
    standbys: int,
    go_on: Callable[[int], bool],
) -> Grouping | None:
    """The best grouping found into this number of clusters, each of one of these sizes; None if none was found.

    With a number of `providers`, exactly that many have a stage. `go_on` gets the number of estimates so far.
    """
    rules = Rules(
        min_stages=sizes[0],
        max_stages=sizes[-1],
        max_clusters=clusters,
        standbys=standbys,
        bonus=0.0,
        min_clusters=clusters,
        max_free=estimates.count - providers,
    )
    improver = Improver(estimates, rng)
    found = []
    for key in KEYS:
        line = sorted_line(estimates.providers, key)
        if providers:
            chosen = runs_of_number(Runs.of(estimates, line[:providers], sizes), providers, clusters, True)
            found.append(_grouping(improver, _dealt(estimates, line[:providers], clusters)))
        else:
            chosen = runs_of_number(Runs.of(estimates, line, sizes), len(line) - standbys, clusters, False)
        found.append(_grouping(improver, chosen))
    fitting = [g for g in found if len(g.orders) == clusters and all(g.rates)]
    fitting = [g for g in fitting if all(sizes[0] <= len(order) <= sizes[-1] for order in g.orders)]
    fitting.sort(key=lambda grouping: -grouping.together)
    better = [improver.improved(g, rules, lambda: go_on(improver.looked_at), 40) for g in fitting[:_IMPROVED]]
    return max(better, key=lambda grouping: grouping.together, default=None)


def runs_of_number(runs: Runs, max_providers: int, clusters: int, uses_all: bool) -> list[Order]:
    """The given number of runs with the largest sum of rates, of at most `max_providers`, or of all providers; none if
    that is impossible."""
    if not runs.rates:
        return []
    sizes = sorted(runs.rates)
    count = len(runs.rates[sizes[0]]) + sizes[0] - 1
    best = np.full((count + 1, clusters + 1), -np.inf)
    taken = np.zeros((count + 1, clusters + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for end in range(1, count + 1):
        if not uses_all:
            best[end] = best[end - 1]
        for size in sizes:
            rate = runs.rates[size][end - size] if end >= size else 0.0
            if rate > 0:
                value = best[end - size, :-1] + rate
                better = value > best[end, 1:]
                best[end, 1:] = np.where(better, value, best[end, 1:])
                taken[end, 1:] = np.where(better, size, taken[end, 1:])
    if not np.isfinite(best[count, clusters]):
        return []
    chosen: list[Order] = []
    end, left = count, clusters
    while end and left:
        size = int(taken[end, left])
        if size:
            chosen.append(tuple(int(i) for i in runs.orders[size][end - size]))
            left -= 1
        end -= size or 1
    # The sum of rates alone decides; a choice that leaves too few standbys is rejected.
    return chosen if sum(map(len, chosen)) <= max_providers else []


def _dealt(estimates: Estimates, line: Sequence[int], clusters: int) -> list[Order]:
    """One provider to every cluster in turn, forth and back, so that each gets some of the best and some of the
    worst."""
    groups: list[list[int]] = [[] for _ in range(clusters)]
    for turn in range(0, len(line), clusters):
        part = line[turn : turn + clusters]
        for number, one in enumerate(part):
            groups[number if turn // clusters % 2 == 0 else clusters - 1 - number].append(one)
    return [tuple(int(i) for i in arranged(estimates, np.array([group]))[0]) for group in groups if group]


def _grouping(improver: Improver, orders: Sequence[Order]) -> Grouping:
    used = {i for order in orders for i in order}
    free = [i for i in range(improver.estimates.count) if i not in used]
    return Grouping(list(orders), improver.rates(orders) if orders else [], free)
