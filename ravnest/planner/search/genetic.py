"""Genetic search: groupings that inherit the best clusters of two others, and change at random.

A child inherits whole clusters, because a cluster is the unit that has a rate. Clusters of both parents are taken by
their rate per provider, as long as they have no provider in common; the remaining providers form new clusters.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from ravnest.planner.search.local_search import Grouping, Improver, Rules
from ravnest.planner.search.runs import Runs

POPULATION: Final = 8


def evolve(improver: Improver, first: Grouping, rules: Rules, go_on: Callable[[], bool]) -> Grouping:
    """The best grouping after some generations, which start from one grouping and random variations of it."""
    rng = improver.rng
    population = [first]
    while len(population) < POPULATION and go_on():
        population.append(_child(improver, first, _shaken(first, rng), rules))
    generation = 0
    while go_on() and generation < 40:
        generation += 1
        one, other = (population[int(i)] for i in rng.choice(len(population), 2, replace=len(population) < 2))
        child = _child(improver, one, other, rules)
        rounds = iter(range(3))
        child = improver.improved(child, rules, lambda rounds=rounds: next(rounds, None) is not None)  # type: ignore[misc]
        worst = min(range(len(population)), key=lambda i: (_worth(population[i], rules), i))
        if _worth(child, rules) > _worth(population[worst], rules) and child.orders not in [
            p.orders for p in population
        ]:
            population[worst] = child
    return max(population, key=lambda grouping: _worth(grouping, rules))


def _worth(grouping: Grouping, rules: Rules) -> float:
    return grouping.together + rules.bonus * len(grouping.orders)


def _shaken(grouping: Grouping, rng: np.random.Generator) -> Grouping:
    """A random part of the clusters of a grouping; the other providers are free."""
    kept = [i for i in range(len(grouping.orders)) if rng.random() < 0.6]
    gone = [p for i in range(len(grouping.orders)) if i not in kept for p in grouping.orders[i]]
    return Grouping(
        [grouping.orders[i] for i in kept], [grouping.rates[i] for i in kept], sorted([*grouping.free, *gone])
    )


def _child(improver: Improver, one: Grouping, other: Grouping, rules: Rules) -> Grouping:
    """Clusters of both parents by their rate per provider, with some randomness, and new ones of the remaining
    providers."""
    rng = improver.rng
    clusters = list(zip([*one.orders, *other.orders], [*one.rates, *other.rates], strict=True))
    ranked = sorted(clusters, key=lambda c: (-(c[1] + rules.bonus) / len(c[0]) * rng.uniform(0.7, 1.3), c[0]))
    free = {*one.free, *(p for order in one.orders for p in order)}
    child = Grouping([], [], [])
    share = rng.uniform(0.4, 1.0)
    for order, rate in ranked:
        if len(child.orders) < share * len(one.orders) and free.issuperset(order):
            child.orders.append(order)
            child.rates.append(rate)
            free.difference_update(order)
    child.free = sorted(free)
    regroup(improver, child, rules)
    return child


def regroup(improver: Improver, child: Grouping, rules: Rules) -> None:
    """Forms clusters of the free providers, in place: neighbours in a line sorted by a random mix of speed and
    bandwidth."""
    free = child.free
    speed, line = improver.estimates.speed, improver.estimates.line_speed
    weight = improver.rng.random()
    ranked = sorted(free, key=lambda i: (-(speed[i] ** weight) * line[i] ** (1 - weight), i))
    left = set(free)
    if len(ranked) >= rules.min_stages:
        largest = min(rules.max_stages, max((len(o) for o in child.orders), default=rules.max_stages) + 2)
        runs = Runs.of(improver.estimates, ranked, range(rules.min_stages, max(largest, rules.min_stages) + 1))
        for order, rate in sorted(runs.best(rules.bonus, 0.0), key=lambda one: -one[1]):
            if len(child.orders) < rules.max_clusters and len(left) - len(order) >= rules.standbys:
                child.orders.append(order)
                child.rates.append(rate)
                left.difference_update(order)
    child.free = sorted(left)
