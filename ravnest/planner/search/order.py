"""In which order providers make up a cluster: of few all orders are looked at, of many what small changes find.

Orders are compared by estimates on a model with few places, thousands at a time; the best of them get exact cuts.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.estimates import Estimates, Orders
from ravnest.planner.search.refine_cuts import exact_cuts, few_places, finer_cuts

EXACT: Final = 5
"""Up to so many providers all orders are looked at."""

PLACES: Final = 25
"""Of the model on which orders are compared; more where there are many stages."""

_CUT: Final = 6
"""So many of the best orders get exact cuts."""

_KEPT: Final = 8
"""So many orders of a set are the beginning of those of a larger one."""

_ROUNDS: Final = 40
"""Of small changes at most."""

_DISTURBED: Final = 2
_COPIES: Final = 6
"""How often the best order is disturbed, and into how many."""


def best_order(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Sequence[Provider],
    exact: int = EXACT,
    averaging_seconds: float = math.inf,
) -> Cluster | None:
    """The best cluster of all of these, in whatever order; None where no order was found that the model can be cut for.

    With `averaging_seconds`, no stage has more parameters than pass its provider's line in that time.
    """
    if not providers or len(providers) > model.max_stages:
        return None
    estimates = Estimates(coarse(model, len(providers)), goal, network, providers, averaging_seconds, fine=True)
    if len(providers) <= exact:
        orders = np.array(list(itertools.permutations(range(len(providers)))))
    else:
        orders = _improved(estimates)
    candidates = [[providers[i] for i in order] for order in _best(estimates, orders, _CUT)]
    rough = few_places(model)
    found = [best_cuts(rough, goal, network, order, averaging_seconds) for order in candidates]
    ranked = sorted((c for c in found if c is not None), key=lambda cluster: -score(goal, cluster))
    if rough is model:
        return ranked[0] if ranked else None
    by_name = {p.name: p for p in providers}
    best_orders = [[by_name[name] for name in cluster.providers] for cluster in ranked[:2]] or candidates[:1]
    finer = [finer_cuts(model, goal, network, order, averaging_seconds) for order in best_orders]
    best = max((c for c in finer if c is not None), key=lambda cluster: score(goal, cluster), default=None)
    if best is None:
        return None
    return exact_cuts(model, goal, network, [by_name[name] for name in best.providers], best, averaging_seconds)


def best_clusters(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> dict[int, Cluster]:
    """For every set of these (bit i: providers[i]) that can hold the model, its best cluster."""
    estimates = Estimates(coarse(model, len(providers)), goal, network, providers, fine=True)
    clusters: dict[int, Cluster] = {}
    for members, orders in ranked_orders(estimates).items():
        best = best_of(model, goal, network, [[providers[i] for i in order] for order in orders[:3]])
        if best is not None:
            clusters[members] = best
    return clusters


def ranked_orders(estimates: Estimates, exact: int = EXACT, kept: int = _KEPT) -> dict[int, Orders]:
    """For every set of providers that can hold the model, its best orders, the best first.

    Of sets up to `exact` all orders are looked at; of larger ones those that come from a best order of all but one,
    with that one put in anywhere.
    """
    count = estimates.count
    found: dict[int, Orders] = {}
    for size in range(1, min(count, estimates.model.max_stages) + 1):
        if size <= exact:
            orders = np.array(list(itertools.permutations(range(count), size)))
        else:
            orders = _one_more(found, count, size)
        rates, _ = estimates.rates(orders)
        fits = rates > 0
        orders, rates = orders[fits], rates[fits]
        members = np.bitwise_or.reduce(1 << orders, axis=1)
        by_rate = np.lexsort((-rates, members))
        orders, members = orders[by_rate], members[by_rate]
        starts = np.flatnonzero(np.diff(members, prepend=-1))
        for start, end in itertools.pairwise([*starts, len(members)]):
            found[int(members[start])] = orders[start : min(end, start + kept)]
    return found


def best_of(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    orders: Sequence[Sequence[Provider]],
    averaging_seconds: float = math.inf,
) -> Cluster | None:
    """The best of the clusters in these orders, each with its best cuts; the first of equals."""
    found = [best_cuts(model, goal, network, order, averaging_seconds) for order in orders]
    return max((c for c in found if c is not None), key=lambda cluster: score(goal, cluster), default=None)


def score(goal: Goal, cluster: Cluster) -> float:
    """What a cluster is worth by itself: its rate, less what staleness beyond the bound takes."""
    return cluster.samples_per_second * goal.worth(cluster.needed_in_flight)


def coarse(model: ModelCosts, stages: int, places: int = PLACES) -> ModelCosts:
    """The model on which orders of so many stages are compared: at least as many stages can be cut from it."""
    coarser = model.coarser(max(places, 2 * stages + 1))
    return coarser if coarser.max_stages >= min(stages, model.max_stages) else model


def _one_more(found: dict[int, Orders], count: int, size: int) -> Orders:
    """The orders of one more provider than the largest that were found, also where a smaller set could not hold it."""
    rows: set[tuple[int, ...]] = set()
    for members in itertools.combinations(range(count), size):
        everyone = sum(1 << i for i in members)
        for one in members:
            for order in found.get(everyone ^ (1 << one), ()):
                for place in range(size):
                    rows.add((*order[:place], one, *order[place:]))
        if everyone not in found:
            # Where no smaller set fits there is nothing to begin with: turns of one order, and of its reverse.
            for turn in range(size):
                turned = members[turn:] + members[:turn]
                rows.update((turned, turned[::-1]))
    return np.array(sorted(rows)).reshape(len(rows), size)


def _improved(estimates: Estimates) -> Orders:
    """Good orders of all providers: from a few plausible ones, by moving one or exchanging two; then from the best of
    those, a little disturbed, once more."""
    orders, rates = _climbed(estimates, np.unique(plausible_orders(estimates.providers), axis=0))
    rng = np.random.default_rng(0)
    for _ in range(_DISTURBED):
        disturbed = np.repeat(orders[:1], _COPIES, axis=0)
        for row in disturbed:
            for _ in range(3):
                i, j = rng.integers(estimates.count, size=2)
                row[[i, j]] = row[[j, i]]
        more, more_rates = _climbed(estimates, disturbed)
        orders, rates = np.concatenate([orders, more]), np.concatenate([rates, more_rates])
        by_rate = np.argsort(-rates, kind="stable")
        orders, rates = orders[by_rate], rates[by_rate]
    return orders


def _climbed(estimates: Estimates, orders: Orders) -> tuple[Orders, Table]:
    """What small changes make of these orders, as long as they help; the best first."""
    count = estimates.count
    rates, _ = estimates.rates(orders)
    kept = np.argsort(-rates, kind="stable")[: 5 if count <= 8 else 3 if count <= 16 else 1]
    orders, rates = orders[kept], rates[kept]
    tries = changes(count)
    for _ in range(_ROUNDS):
        tried = orders[:, tries].reshape(-1, count)
        tried_rates, _ = estimates.rates(tried)
        by_start = tried_rates.reshape(len(orders), -1)
        at = np.argmax(by_start, axis=1)
        best = by_start[np.arange(len(orders)), at]
        better = best > rates * (1 + 1e-6)
        if not better.any():
            break
        chosen = tried.reshape(len(orders), -1, count)[np.arange(len(orders)), at]
        orders, rates = np.where(better[:, None], chosen, orders), np.where(better, best, rates)
        # Those that meet go on as one, and the worst are given up.
        orders, first = np.unique(orders, axis=0, return_index=True)
        rates = rates[first]
        kept = np.argsort(-rates, kind="stable")[: max(1, len(orders) - 1)]
        orders, rates = orders[kept], rates[kept]
    return orders, rates


def plausible_orders(providers: Sequence[Provider]) -> Orders:
    """Orders to begin with: fast lines inside, little memory last, and some simple ones."""
    everyone = range(len(providers))

    def line(i: int) -> float:
        return min(providers[i].up_bytes_per_second, providers[i].down_bytes_per_second)

    by_line = sorted(everyone, key=lambda i: (line(i), providers[i].name))
    by_memory = sorted(everyone, key=lambda i: (-providers[i].memory_bytes, providers[i].name))
    by_speed = sorted(everyone, key=lambda i: (-providers[i].compute_speed, providers[i].name))
    by_latency = sorted(everyone, key=lambda i: (providers[i].latency_seconds, providers[i].name))
    inside = by_line[::2] + by_line[1::2][::-1]
    hosts = sorted(everyone, key=lambda i: (providers[i].machine, providers[i].name))
    return np.array([inside, inside[::-1], by_memory, by_speed, by_speed[::-1], by_latency, hosts, list(everyone)])


@functools.cache
def changes(count: int) -> Orders:
    """All exchanges of two positions, and all moves of one; in a large order over a short distance."""
    reach = count if count <= 12 else 5
    rows: set[tuple[int, ...]] = set()
    for i, j in itertools.permutations(range(count), 2):
        if abs(i - j) <= reach:
            exchanged = list(range(count))
            exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
            moved = list(range(count))
            moved.insert(j, moved.pop(i))
            rows.update((tuple(exchanged), tuple(moved)))
    return np.array(sorted(rows)).reshape(len(rows), count)


def _best(estimates: Estimates, orders: Orders, most: int) -> Orders:
    rates, _ = estimates.rates(orders)
    by_rate = np.argsort(-rates, kind="stable")[:most]
    return orders[by_rate[rates[by_rate] > 0]]
