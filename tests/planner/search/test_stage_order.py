"""The order of providers in a cluster, and the estimates by which orders are compared."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.problem import Goal, Line, Network, Provider, Requester
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.estimates import Estimates
from ravnest.planner.search.objective import score
from ravnest.planner.search.order import best_of, best_order
from tests.planner.best_clusters import best_clusters
from tests.planner.instances import random_model, random_providers


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_the_best_order_is_nearly_the_best_of_all_orders(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    model, providers, goal, network = random_model(rng), random_providers(rng, count), Goal(), Network()
    found = best_order(model, goal, network, providers)
    best = best_of(model, goal, network, list(itertools.permutations(providers)))
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert sorted(found.providers) == sorted(p.name for p in providers)
        assert score(goal, found) >= 0.97 * score(goal, best)


def test_a_large_cluster_is_no_worse_than_in_the_order_given() -> None:
    rng = np.random.default_rng(5)
    model, providers, goal, network = random_model(rng, places=25), random_providers(rng, 9), Goal(), Network()
    given_order = best_cuts(model, goal, network, providers)
    found = best_order(model, goal, network, providers)
    assert given_order is not None and found is not None
    assert score(goal, found) >= score(goal, given_order)


def test_every_set_that_can_hold_the_model_has_its_best_cluster() -> None:
    rng = np.random.default_rng(2)
    model, providers, goal, network = random_model(rng), random_providers(rng, 4), Goal(), Network()
    found = best_clusters(model, goal, network, providers)
    for members in range(1, 16):
        chosen = [providers[i] for i in range(4) if members >> i & 1]
        best = best_of(model, goal, network, list(itertools.permutations(chosen)))
        assert (members in found) == (best is not None)
        if best is not None:
            assert score(goal, found[members]) >= 0.99 * score(goal, best)


def test_machines_that_only_the_coordinator_connects_are_not_made_neighbours() -> None:
    model = random_model(np.random.default_rng(1))
    slow = Requester(up_bytes_per_second=1e5, down_bytes_per_second=1e5)
    machines = [
        Provider(name=name, memory_bytes=2 * 2**30, up_bytes_per_second=1e7, down_bytes_per_second=1e7, reachable=open_)
        for name, open_ in (("a", False), ("b", False), ("c", True))
    ]
    found = best_order(model, Goal(), Network(requester=slow), machines)
    assert found is not None
    assert found.providers[1] == "c"


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from([math.inf, 30.0]), hosts=st.booleans())
def test_an_estimate_is_at_most_the_rate_of_the_best_cuts_and_near_it(seed: int, seconds: float, hosts: bool) -> None:
    rng = np.random.default_rng(seed)
    model, goal = random_model(rng, places=9), Goal()
    providers = random_providers(rng, 5)
    if hosts:
        providers = [
            Provider(name=p.name, memory_bytes=p.memory_bytes, up_bytes_per_second=1e6, host=f"host {i % 2}", cores=2)
            for i, p in enumerate(providers)
        ]
    measured = {("p0", "p1"): Line(2e5, 0.1), ("p1", "p0"): Line(3e5, 0.1)}
    network = Network(measured, Requester(up_bytes_per_second=1e6, down_bytes_per_second=1e6))
    estimates = Estimates(model, goal, network, providers, fine=True)
    estimates.limit_averaging(seconds)
    orders = list(itertools.chain.from_iterable(itertools.permutations(range(5), k) for k in (1, 2, 3)))
    rows = np.array([(*order, *(-1,) * (3 - len(order))) for order in orders])
    rates, _ = estimates.rates(rows)
    exact = []
    for order, rate in zip(orders, rates, strict=True):
        cluster = best_cuts(model, goal, network, [providers[i] for i in order], seconds)
        exact.append(0.0 if cluster is None else score(goal, cluster))
        assert (rate > 0) == (cluster is not None)
        assert rate <= exact[-1] * (1 + 1e-4)
    if any(exact):
        assert sum(rates) == pytest.approx(sum(exact), rel=0.05)


def test_relays_are_counted_between_neighbours_that_cannot_dial_one_another() -> None:
    providers = [Provider(name=n, memory_bytes=1, reachable=n in "ad") for n in "abcd"]
    estimates = Estimates(random_model(np.random.default_rng(0)), Goal(), Network(), providers)
    assert estimates.relays(np.array([[0, 1, 2], [1, 0, 2], [1, 2, -1], [3, -1, -1]])).tolist() == [1, 0, 1, 0]
