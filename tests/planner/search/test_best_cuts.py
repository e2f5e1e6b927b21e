"""Cuts for a given order: exactly the best, against listing all of them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import MAX_IN_FLIGHT, Goal, Network, Provider
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score
from tests.planner.instances import random_model, random_providers

GOALS = [
    Goal(),
    Goal(in_flight=2),
    Goal(max_staleness=1),
    Goal(versions="recompute"),
    Goal(versions="latest"),
    Goal(versions="double", accumulate=3),
    Goal(max_staleness=6, accumulate=2),
]


def listed(
    model: ModelCosts, goal: Goal, network: Network, order: list[Provider], averaging_seconds: float = math.inf
) -> Cluster | None:
    """The best of all cuts and all numbers in flight, one after the other."""
    numbers = [goal.max_in_flight] if goal.in_flight else range(1, goal.max_in_flight + 1)
    best = None
    for in_flight in [1] if len(order) == 1 else numbers:
        for cuts in itertools.combinations(range(1, model.last), len(order) - 1):
            bounds = (0, *cuts, model.last)
            if not all(model.legal[i, j] for i, j in itertools.pairwise(bounds)):
                continue
            cluster = cluster_of(model, goal, network, order, cuts, in_flight)
            if not all(
                stage.memory_bytes <= provider.memory_bytes
                and stage.parameter_bytes
                <= averaging_seconds * min(provider.up_bytes_per_second, provider.down_bytes_per_second)
                for stage, provider in zip(cluster.stages, order, strict=True)
            ):
                continue
            if best is None or score(goal, cluster) > score(goal, best):
                best = cluster
    return best


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), goal=st.sampled_from(GOALS))
def test_cuts_for_an_order_are_the_best_of_all_cuts_and_numbers_in_flight(seed: int, count: int, goal: Goal) -> None:
    rng = np.random.default_rng(seed)
    model, order, network = random_model(rng, places=8), random_providers(rng, count), Network()
    found, best = best_cuts(model, goal, network, order), listed(model, goal, network, order)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert score(goal, found) == pytest.approx(score(goal, best), rel=1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), seconds=st.floats(1.0, 200.0))
def test_cuts_keep_to_the_time_that_averaging_may_take(seed: int, seconds: float) -> None:
    rng = np.random.default_rng(seed)
    model, order, network, goal = random_model(rng, places=8), random_providers(rng, 3), Network(), Goal()
    found = best_cuts(model, goal, network, order, seconds)
    best = listed(model, goal, network, order, seconds)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert score(goal, found) == pytest.approx(score(goal, best), rel=1e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), goal=st.sampled_from(GOALS))
def test_stages_cover_the_model_each_owns_a_parameter_and_fits(seed: int, count: int, goal: Goal) -> None:
    rng = np.random.default_rng(seed)
    model, order = random_model(rng, places=13), random_providers(rng, count)
    found = best_cuts(model, goal, Network(), order)
    if found is None:
        return
    assert [stage.start for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert found.stages[-1].end == model.places[-1]
    for stage, provider in zip(found.stages, order, strict=True):
        assert stage.parameter_bytes > 0
        assert stage.memory_bytes <= provider.memory_bytes
    assert sum(stage.parameter_bytes for stage in found.stages) == pytest.approx(model.parameter_bytes[-1])
    assert found.in_flight <= goal.max_in_flight


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 5))
def test_a_plan_begins_with_as_many_in_flight_as_are_enough(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    model = random_model(rng, places=13)
    order = [replace(provider, memory_bytes=10**15) for provider in random_providers(rng, count)]
    found = best_cuts(model, Goal(), Network(), order)
    assert found is not None
    assert found.in_flight == min(MAX_IN_FLIGHT, found.enough_in_flight)
    bounded = best_cuts(model, Goal(max_staleness=3), Network(), order)
    assert bounded is not None and bounded.in_flight <= 4


def test_more_stages_than_the_model_has_parameters_are_none() -> None:
    rng = np.random.default_rng(0)
    model = random_model(rng, places=4)
    assert best_cuts(model, Goal(), Network(), random_providers(rng, 4)) is None
    assert best_cuts(model, Goal(), Network(), []) is None
