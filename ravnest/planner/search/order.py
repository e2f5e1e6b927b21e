"""Order of the providers in a cluster: the best of all orders for few providers, of a local search for many.

Orders are compared by estimates on a model with few places, thousands at a time; the best of them get exact cuts.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.estimates import Estimates, Orders
from ravnest.planner.search.objective import score
from ravnest.planner.search.refine_cuts import exact_cuts, few_places, finer_cuts

EXACT: Final = 5
"""Providers up to which all orders are compared."""

PLACES: Final = 25
"""Places of the model on which orders are compared; more if there are many stages."""

_CUT: Final = 6
"""Number of the best orders that get exact cuts."""

_KEPT: Final = 8
"""Orders of a set from which those of larger sets are built."""

_ROUNDS: Final = 40
"""Maximum rounds of small changes."""

_PERTURBED: Final = 2
_COPIES: Final = 6
"""Number of times that the best order is perturbed, and the number of perturbed copies."""


def best_order(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Sequence[Provider],
    exact: int = EXACT,
) -> Cluster | None:
    """The best cluster of all these providers in any order; None if no order was found that the model can be cut
    for."""
    if not providers or len(providers) > model.max_stages:
        return None
    estimates = Estimates(coarse(model, len(providers)), goal, network, providers, fine=True)
    if len(providers) <= exact:
        orders = np.array(list(itertools.permutations(range(len(providers)))))
    else:
        orders = _improved(estimates)
    candidates = [[providers[i] for i in order] for order in _best(estimates, orders, _CUT)]
    rough = few_places(model)
    found = [best_cuts(rough, goal, network, order) for order in candidates]
    ranked = sorted((c for c in found if c is not None), key=lambda cluster: -score(goal, cluster))
    if rough is model:
        return ranked[0] if ranked else None
    by_name = {p.name: p for p in providers}
    best_orders = [[by_name[name] for name in cluster.providers] for cluster in ranked[:2]] or candidates[:1]
    finer = [finer_cuts(model, goal, network, order) for order in best_orders]
    best = max((c for c in finer if c is not None), key=lambda cluster: score(goal, cluster), default=None)
    if best is None:
        return None
    return exact_cuts(model, goal, network, [by_name[name] for name in best.providers], best)


def ranked_orders(estimates: Estimates) -> dict[int, Orders]:
    """For every set of providers that can hold the model, its best orders, the best first.

    For sets up to EXACT, all orders are compared; for larger ones, the best orders of all but one provider with that
    one inserted anywhere.
    """
    count = estimates.count
    found: dict[int, Orders] = {}
    for size in range(1, min(count, estimates.model.max_stages) + 1):
        if size <= EXACT:
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
            found[int(members[start])] = orders[start : min(end, start + _KEPT)]
    return found


def best_of(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    orders: Sequence[Sequence[Provider]],
) -> Cluster | None:
    """The best of the clusters with these orders and their best cuts; the first of equals."""
    found = [best_cuts(model, goal, network, order) for order in orders]
    return max((c for c in found if c is not None), key=lambda cluster: score(goal, cluster), default=None)


def coarse(model: ModelCosts, stages: int, places: int = PLACES) -> ModelCosts:
    """The model on which orders of this many stages are compared: it can be cut into at least as many."""
    coarser = model.coarser(max(places, 2 * stages + 1))
    return coarser if coarser.max_stages >= min(stages, model.max_stages) else model


def _one_more(found: dict[int, Orders], count: int, size: int) -> Orders:
    """Orders of the next larger size, also for sets without a smaller set that can hold the model."""
    rows: set[tuple[int, ...]] = set()
    for members in itertools.combinations(range(count), size):
        whole = sum(1 << i for i in members)
        for one in members:
            for order in found.get(whole ^ (1 << one), ()):
                for place in range(size):
                    rows.add((*order[:place], one, *order[place:]))
        if whole not in found:
            # There may be no smaller set to start from: rotations of one order, and of its reverse.
            for turn in range(size):
                turned = members[turn:] + members[:turn]
                rows.update((turned, turned[::-1]))
    return np.array(sorted(rows)).reshape(len(rows), size)


def _improved(estimates: Estimates) -> Orders:
    """Good orders of all providers: from a few plausible ones by moves and exchanges, then again from perturbed copies
    of the best."""
    orders, rates = _climbed(estimates, np.unique(plausible_orders(estimates.providers), axis=0))
    rng = np.random.default_rng(0)
    for _ in range(_PERTURBED):
        perturbed = np.repeat(orders[:1], _COPIES, axis=0)
        for row in perturbed:
            for _ in range(3):
                i, j = rng.integers(estimates.count, size=2)
                row[[i, j]] = row[[j, i]]
        more, more_rates = _climbed(estimates, perturbed)
        orders, rates = np.concatenate([orders, more]), np.concatenate([rates, more_rates])
        by_rate = np.argsort(-rates, kind="stable")
        orders, rates = orders[by_rate], rates[by_rate]
    return orders


def _climbed(estimates: Estimates, orders: Orders) -> tuple[Orders, Table]:
    """These orders after small changes, as long as they help; the best first."""
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
        # Equal orders continue as one, and the worst is dropped.
        orders, first = np.unique(orders, axis=0, return_index=True)
        rates = rates[first]
        kept = np.argsort(-rates, kind="stable")[: max(1, len(orders) - 1)]
        orders, rates = orders[kept], rates[kept]
    return orders, rates


def plausible_orders(providers: Sequence[Provider]) -> Orders:
    """Starting orders: fast lines inside, little memory last, and some simple ones."""
    positions = range(len(providers))

    def line(i: int) -> float:
        return min(providers[i].up_bytes_per_second, providers[i].down_bytes_per_second)

    by_line = sorted(positions, key=lambda i: (line(i), providers[i].name))
    by_memory = sorted(positions, key=lambda i: (-providers[i].memory_bytes, providers[i].name))
    by_speed = sorted(positions, key=lambda i: (-providers[i].compute_speed, providers[i].name))
    by_latency = sorted(positions, key=lambda i: (providers[i].latency_seconds, providers[i].name))
    inside = by_line[::2] + by_line[1::2][::-1]
    hosts = sorted(positions, key=lambda i: (providers[i].machine, providers[i].name))
    return np.array([inside, inside[::-1], by_memory, by_speed, by_speed[::-1], by_latency, hosts, list(positions)])


@functools.cache
def changes(count: int) -> Orders:
    """All exchanges of two positions and all moves of one, as permutations; in a large order over a short distance."""
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


def _best(estimates: Estimates, orders: Orders, count: int) -> Orders:
    rates, _ = estimates.rates(orders)
    by_rate = np.argsort(-rates, kind="stable")[:count]
    return orders[by_rate[rates[by_rate] > 0]]
