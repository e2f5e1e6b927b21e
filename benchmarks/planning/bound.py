"""Upper bound on the score of any plan, for judging plans of many providers, whose best one cannot be computed.

Let every part of the model have a price, all prices together 1. A cluster that makes r microbatches per second earns r,
and each of its stages earns r times the price of the parts in it. A provider has one stage, from place i to place j,
and its cluster cannot be faster than that stage: so the provider earns at most

    e(provider) = max over i, j that fit into its memory of  price(i, j) / seconds(provider, i, j)

with the seconds of computing or of its own line. All clusters together earn at most the sum of e, for any prices;
prices with a small sum are found by raising those of the parts whose holders earn the least.

Averaging: if no stage takes longer than A to pass its provider's line, stages that would are left out of e, and a round
of C clusters with the total rate R takes 2(C-1)/C * A. A plan lies between two such A: its rate is at most that of the
longer one, and its loss at least that of the shorter one. More clusters lose less, and each is slower: for any bonus b
on a cluster, R + b C is at most the sum of e with price(i, j) * (1 / seconds + b), by the same argument. Finally, every
input passes the requester's line once for every microbatch.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.objective import averaging_bounds, score_of

_STEPS: Final = 20
_BOUNDS: Final = 24
_BONUSES: Final = (0.3, 1.0, 3.0, 10.0)
"""Bonuses on a cluster, relative to the average rate of one."""
_SAMPLE: Final = 400
"""Providers from which prices are found; the bound itself counts all of them."""


def upper_bound(model: ModelCosts, goal: Goal, network: Network, providers: Sequence[Provider]) -> float:
    """A score that no plan of these providers can exceed."""
    # A cluster that trains alone keeps nothing for averaging.
    goal = replace(goal, average_memory=0.0)
    least = goal.max_in_flight if goal.in_flight is not None else 1
    held = np.minimum(memory_bytes(model, goal, least), memory_bytes(model, goal, 1))
    seconds = np.concatenate(
        [
            Estimates(model, goal, network, providers[k : k + 500]).stages.min_seconds()
            for k in range(0, len(providers), 500)
        ]
    )
    memory = np.array([float(p.memory_bytes) for p in providers])
    fits = (held[None] <= memory[:, None, None]) & model.legal[None]
    speed: Table = np.where(fits, 1.0 / seconds, 0.0)
    max_clusters = goal.max_clusters or len(providers)
    clusters = min(max_clusters, math.floor(_min_sum(fits.astype(float), model) + 1e-6))
    if clusters < 1:
        return 0.0
    if clusters == 1:
        return model.samples * _min_sum(speed, model)
    lines = np.array([min(p.up_bytes_per_second, p.down_bytes_per_second) for p in providers])
    owned = model.between(model.parameter_bytes)
    averaging = owned[None] / lines[:, None, None]
    bounds = sorted({0.0, *averaging_bounds(model, providers, _BOUNDS)})
    # A single cluster does not average, and its rate is bounded by the earnings with one copy of the model.
    best = _one_cluster(model, speed)
    fed = sum(model.input_bytes)
    max_fed = model.samples * network.requester.up_bytes_per_second / fed if fed else math.inf
    counts = np.unique(np.geomspace(2, clusters, 200).round())
    for shorter, longer in itertools.pairwise([*bounds, math.inf]):
        within = averaging <= longer
        rates = np.full(len(counts), max_fed)
        fastest = _min_sum(np.where(within, speed, 0), model)
        for bonus in (0.0, *(fastest / clusters * factor for factor in _BONUSES)):
            total = _min_sum(np.where(within & fits, speed + bonus, 0), model) if bonus else fastest
            # A count between two of these may be as fast as the lower one.
            fewer = np.concatenate([[2.0], counts[:-1]])
            rates = np.minimum(rates, model.samples * np.maximum(0.0, total - bonus * fewer))
        best = max(best, float(score_of(goal, model.samples, rates, counts, shorter).max()))
    return best


def _min_sum(gain: Table, model: ModelCosts) -> float:
    """The minimum over some prices of the sum over all providers of their maximum of price(i, j) * gain."""
    parts = model.last
    step = max(1, len(gain) // _SAMPLE)
    sample = gain[::step]
    work = np.diff(model.heavy_seconds + model.light_seconds)
    owned = np.diff(model.parameter_bytes)
    starts = [p / p.sum() for p in (work, owned, work / work.sum() + owned / owned.sum(), np.ones(parts)) if p.sum()]
    best_prices = min(starts, key=lambda p: _sum(sample, p)[0])
    best = _sum(sample, best_prices)[0]
    prices = best_prices
    for k in range(_STEPS):
        total, held = _sum(sample, prices)
        if total < best:
            best, best_prices = total, prices
        # Raise the price of parts that earn less than their share.
        share = held / max(held.sum(), 1e-30) * parts
        prices = prices * np.exp(-(0.5 / (1 + k)) * (share - 1))
        prices = prices / prices.sum()
    return min(_sum(gain, p)[0] for p in (*starts, best_prices))


def _sum(gain: Table, prices: Table) -> tuple[float, Table]:
    """The sum for these prices, and the share of each part in it for a price of 1."""
    sums = np.concatenate([[0.0], np.cumsum(prices)])
    between = np.maximum(sums[None, :] - sums[:, None], 0)
    earned = gain * between[None]
    flat = earned.reshape(len(gain), -1)
    at = flat.argmax(axis=1)
    total = float(flat[np.arange(len(gain)), at].sum(dtype=float))
    starts, ends = np.divmod(at, len(sums))
    each = gain.reshape(len(gain), -1)[np.arange(len(gain)), at].astype(float)
    held = np.zeros(len(sums))
    np.add.at(held, starts, each)
    np.add.at(held, ends, -each)
    return total, np.cumsum(held)[:-1]


def _one_cluster(model: ModelCosts, speed: Table) -> float:
    """Bound on a single cluster: some provider must hold each part, so no cluster is faster than the fastest for it."""
    count = min(len(speed), model.max_stages)
    # The limiting part is the one for which even the fastest provider is slow.
    containing = np.zeros(model.last)
    for part in range(model.last):
        containing[part] = speed[:, : part + 1, part + 1 :].max(initial=0.0)
    fastest = float(containing.min())
    earned = np.sort(_earned(speed, model))[::-1][:count]
    return model.samples * min(fastest, float(earned.sum()))


def _earned(speed: Table, model: ModelCosts) -> Table:
    work = model.heavy_seconds + model.light_seconds
    prices = work / work[-1]
    between = np.maximum(prices[None, :] - prices[:, None], 0)
    earned: Table = (speed * between[None]).reshape(len(speed), -1).max(axis=1)
    return earned
