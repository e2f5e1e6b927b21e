"""So many clusters of many providers, and no other number: where a requester says how many there are to be.

Providers in a sorted line are cut into so many clusters of neighbours, or dealt out so that all get some of every
kind; the best of these is improved by small changes that leave the number as it is.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.local_search import Grouping, Improver, Order, Rules
from ravnest.planner.search.runs import KEYS, Runs, arranged, sorted_line

_IMPROVED: Final = 2
"""Groupings that small changes are tried on."""


def set_number(
    estimates: Estimates,
    rng: np.random.Generator,
    sizes: Sequence[int],
    clusters: int,
    providers: int,
    standbys: int,
    go_on: Callable[[int], bool],
) -> Grouping | None:
    """The best grouping found into so many clusters of one of these sizes; None where none was found that fits.

    With a number of `providers` so many have a stage. `go_on` is asked with the number of estimates so far.
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
            chosen = _of_everybody(estimates, line[:providers], sizes, clusters)
            found.append(_grouping(improver, _dealt(estimates, line[:providers], clusters)))
        else:
            chosen = runs_of_number(Runs.of(estimates, line, sizes), len(line) - standbys, clusters, False)
        found.append(_grouping(improver, chosen))
    fitting = [g for g in found if len(g.orders) == clusters and all(g.rates)]
    fitting = [g for g in fitting if all(sizes[0] <= len(order) <= sizes[-1] for order in g.orders)]
    fitting.sort(key=lambda grouping: -grouping.together)
    better = [improver.improved(g, rules, lambda: go_on(improver.looked_at), 40) for g in fitting[:_IMPROVED]]
    return max(better, key=lambda grouping: grouping.together, default=None)


def runs_of_number(runs: Runs, most: int, clusters: int, everybody: bool) -> list[Order]:
    """The runs with the largest sum of rates that are so many, of `most` providers at most, or of all of them; none
    where they cannot be."""
    if not runs.rates:
        return []
    sizes = sorted(runs.rates)
    count = len(runs.rates[sizes[0]]) + sizes[0] - 1
    best = np.full((count + 1, clusters + 1), -np.inf)
    taken = np.zeros((count + 1, clusters + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for end in range(1, count + 1):
        if not everybody:
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
    # Those who are to stand by are not looked for here: too large a choice is none.
    return chosen if sum(map(len, chosen)) <= most else []


def _of_everybody(estimates: Estimates, line: Sequence[int], sizes: Sequence[int], clusters: int) -> list[Order]:
    return runs_of_number(Runs.of(estimates, line, sizes), len(line), clusters, True)


def _dealt(estimates: Estimates, line: Sequence[int], clusters: int) -> list[Order]:
    """To every cluster one in turn, there and back, so that each has some of the best and some of the worst."""
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
