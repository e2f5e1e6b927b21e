"""In which order providers make up a cluster: exact for few of them, good for many.

For few, the best way to hold the first places of the model is found for every set of providers and every last one of
them, from the smallest sets up: so all orders are looked at, of every subset, without listing them.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster, memory_bytes, stage_tables
from ravnest.planner.cuts import best_cuts
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.providers import Goal, Network, Provider

EXACT: Final = 8
"""Up to so many providers all orders are looked at."""

_IN_FLIGHT: Final = (1, 3, 5, 7, 9, 12)
"""Numbers in flight for which orders are looked for: more need more memory, which makes for other orders."""

_ABOUT: Final = 0.1
"""Slowest stages that differ by no more than this share are taken for about as fast."""

_TRIP_WEIGHT: Final = 1e-3
"""How much a shorter way counts against a faster slowest stage, of which it makes nothing slower."""


def best_order(
    model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider], exact: int = EXACT
) -> Cluster | None:
    """The best cluster of all of these, in whatever order; None where the model cannot be cut for them."""
    if not providers or len(providers) > model.most_stages:
        return None
    if len(providers) <= exact:
        everyone = (1 << len(providers)) - 1
        candidates = [orders[everyone] for orders in _orders(model, goal, network, providers) if everyone in orders]
        return best_of(model, goal, network, [[providers[i] for i in order] for order in candidates])
    return _improved(model, goal, network, providers)


def best_clusters(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> dict[int, Cluster]:
    """For every set of these (bit i: providers[i]) that can hold the model, its best cluster."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for orders in _orders(model, goal, network, providers):
        for members, order in orders.items():
            if order not in found.setdefault(members, []):
                found[members].append(order)
    clusters: dict[int, Cluster] = {}
    for members, candidates in found.items():
        best = best_of(model, goal, network, [[providers[i] for i in order] for order in candidates])
        if best is not None:
            clusters[members] = best
    return clusters


def best_of(model: ModelCosts, goal: Goal, network: Network, orders: Sequence[Sequence[Provider]]) -> Cluster | None:
    """The best of the clusters in these orders, each with its best cuts; the first of equals."""
    found = [cluster for order in orders if (cluster := best_cuts(model, goal, network, order)) is not None]
    return max(found, key=lambda cluster: score(goal, cluster), default=None)


def score(goal: Goal, cluster: Cluster) -> float:
    """What a cluster is worth by itself: its rate, less what staleness beyond the bound takes."""
    return cluster.samples_per_second * goal.worth(cluster.in_flight)


def _orders(
    model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]
) -> Iterator[dict[int, tuple[int, ...]]]:
    """For some numbers in flight, the best order of every set of providers that can hold the model."""
    if not providers:
        return
    alone = [stage_tables(model, goal, network, p, None, None) for p in providers]
    nodes = []
    for table, provider in zip(alone, providers, strict=True):
        # Between neighbours on other machines, which is what most have.
        crossing = model.backward_bytes[:, None] + model.forward_bytes[None, :]
        back = model.forward_bytes[:, None] + model.backward_bytes[None, :]
        up, down = crossing / provider.up_bytes_per_second, table.down + back / provider.down_bytes_per_second
        nodes.append(np.where(model.legal, np.maximum(table.compute, np.maximum(up, down)), np.inf))
    seen: list[list[Table]] = []
    for in_flight in sorted({min(n, goal.most_in_flight) for n in _IN_FLIGHT}):
        held = memory_bytes(model, goal, in_flight)
        fitting = [np.where(held <= p.memory_bytes, n, np.inf) for n, p in zip(nodes, providers, strict=True)]
        if any(all(np.array_equal(a, b) for a, b in zip(fitting, other, strict=True)) for other in seen):
            continue
        seen.append(fitting)
        for step in (None, _ABOUT):
            yield _best_orders(model, network, providers, fitting, [t.compute for t in alone], in_flight, step)


def _best_orders(
    model: ModelCosts,
    network: Network,
    providers: Sequence[Provider],
    seconds: Sequence[Table],
    trips: Sequence[Table],
    in_flight: int,
    step: float | None,
) -> dict[int, tuple[int, ...]]:
    """For every set of providers, the order of the fastest slowest stage, and of those nearly as fast a short way."""
    count = len(providers)
    lines = [[_between(model, network, a, b) for b in providers] for a in providers]
    # By set and last provider: for every place, the slowest stage up to there, the way, and whom and where from.
    slowest: dict[tuple[int, int], Table] = {(1 << k, k): seconds[k][0] for k in range(count)}
    way: dict[tuple[int, int], Table] = {(1 << k, k): trips[k][0] for k in range(count)}
    came: dict[tuple[int, int], np.ndarray] = {}
    places = np.arange(len(model.places))
    for members in range(1, 1 << count):
        for last in range(count):
            if not members >> last & 1 or members == 1 << last:
                continue
            rest = members ^ (1 << last)
            best_key: Table | None = None
            for before in range(count):
                if not rest >> before & 1:
                    continue
                line, line_trip = lines[before][last]
                at = np.maximum(slowest[rest, before], line)
                through = np.maximum(at[:, None], seconds[last])
                path = (way[rest, before] + line_trip)[:, None] + trips[last]
                key = _key(through, path, in_flight, step)
                start = np.argmin(key, axis=0)
                value = key[start, places]
                if best_key is None:
                    best_key, best = value, (through[start, places], path[start, places])
                    origin = np.stack([np.full(len(places), before), start])
                else:
                    better = value < best_key
                    best_key = np.where(better, value, best_key)
                    best = tuple(
                        np.where(better, new[start, places], old)
                        for new, old in zip((through, path), best, strict=True)
                    )
                    origin = np.where(better, np.stack([np.full(len(places), before), start]), origin)
            slowest[members, last], way[members, last] = best
            came[members, last] = origin
    orders: dict[int, tuple[int, ...]] = {}
    for members in range(1, 1 << count):
        ends = [k for k in range(count) if members >> k & 1 and np.isfinite(slowest[members, k][-1])]
        if ends:
            last = min(ends, key=lambda k: max(slowest[members, k][-1], way[members, k][-1] / in_flight))
            orders[members] = _traced(came, members, last, model.last)
    return orders


def _key(slowest: Table, way: Table, in_flight: int, step: float | None) -> Table:
    """What makes the better beginning of an order, whose end is not known yet: the faster slowest stage, or, where the
    end may well be slower, the shorter way among those about as fast."""
    if step is None:
        return np.maximum(slowest, way / in_flight) + _TRIP_WEIGHT * way
    about = np.floor(np.log(np.maximum(slowest, 1e-12)) / step)
    key: Table = about + way / (np.max(way) + 1)
    return key


def _traced(
    came: dict[tuple[int, int], np.ndarray],
    members: int,
    last: int,
    place: int,
) -> tuple[int, ...]:
    order = [last]
    while members != 1 << last:
        before, start = came[members, last][:, place]
        members, last, place = members ^ (1 << last), int(before), int(start)
        order.append(last)
    return tuple(reversed(order))


def _between(model: ModelCosts, network: Network, before: Provider, after: Provider) -> tuple[Table, Table]:
    """Seconds that the line between two takes at each place, and its part of the way."""
    forth, back = network.line(before, after), network.line(after, before)
    there, here = model.forward_bytes / forth.bytes_per_second, model.backward_bytes / back.bytes_per_second
    return np.maximum(there, here), there + here + forth.latency_seconds + back.latency_seconds


def _improved(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> Cluster | None:
    """Many providers: from a few plausible orders, exchanging two at a time while that helps."""
    by_memory = sorted(providers, key=lambda p: (-p.memory_bytes, p.name))
    by_line = sorted(providers, key=lambda p: (-min(p.up_bytes_per_second, p.down_bytes_per_second), p.name))
    best = best_of(model, goal, network, [list(providers), by_memory, by_line])
    if best is None:
        return None
    by_name = {p.name: p for p in providers}
    order = [by_name[name] for name in best.providers]
    for distance in range(1, len(order)):
        for k in range(len(order) - distance):
            tried = list(order)
            tried[k], tried[k + distance] = tried[k + distance], tried[k]
            cluster = best_cuts(model, goal, network, tried)
            if cluster is not None and score(goal, cluster) > score(goal, best) * (1 + 1e-9):
                best, order = cluster, tried
    return best
