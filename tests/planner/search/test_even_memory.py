"""Cuts that fill the memory evenly: no provider takes more of the model than it must, at about the same speed."""

import numpy as np
import pytest

from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Requester
from ravnest.planner.search.even_memory import TOLERANCE, fill, with_even_memory
from ravnest.planner.search.search import form
from tests.planner.instances import random_model, random_providers
from tests.planner.made_up import cut_at, machine, model, named

NETWORK = Network({}, Requester())
ALONE = Goal(max_clusters=1)


def heavy_crossing(layers: int = 24) -> ModelCosts:
    """A model whose crossings limit every pipeline of home machines, wherever it is cut."""
    return model(layers, layer_seconds=0.001, layer_bytes=4e7, crossing_bytes=5e6)


def test_if_the_lines_are_the_limit_the_stages_become_equal() -> None:
    providers = named(*(machine(name) for name in "abc"))
    uneven = cut_at(heavy_crossing(), ALONE, NETWORK, providers, ("abc", (22, 23)))
    evened = with_even_memory(heavy_crossing(), ALONE, NETWORK, providers, uneven)
    [before], [after] = uneven.clusters, evened.clusters
    assert fill(after, providers) < 0.55 * fill(before, providers)
    memory = [stage.memory_bytes for stage in after.stages]
    assert max(memory) < 1.15 * sum(memory) / 3, "even but for the size of a layer"
    assert evened.score >= (1 - TOLERANCE) * uneven.score
    assert (after.providers, after.in_flight) == (before.providers, before.in_flight)


def test_a_machine_that_lends_more_memory_takes_more_of_the_model() -> None:
    providers = named(machine("a", memory=4e9), machine("b", memory=12e9))
    uneven = cut_at(heavy_crossing(), ALONE, NETWORK, providers, ("ab", (12,)))
    [after] = with_even_memory(heavy_crossing(), ALONE, NETWORK, providers, uneven).clusters
    small, large = (stage.memory_bytes for stage in after.stages)
    assert large > 2 * small


def test_no_machine_is_made_the_bottleneck_for_even_memory() -> None:
    # The slow machine has the memory for half of the model, and the time for a quarter.
    providers = named(machine("fast", 3.0), machine("slow", 1.0))
    found = form(model(24), ALONE, NETWORK, list(providers.values()))
    evened = with_even_memory(model(24), ALONE, NETWORK, providers, found)
    assert evened.score >= (1 - TOLERANCE) * found.score
    owned = {stage.provider: stage.parameter_bytes for stage in evened.clusters[0].stages}
    assert owned["fast"] > 2 * owned["slow"]


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_fuller_nor_slower_than_the_tolerance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, providers = random_model(rng, places=60), random_providers(rng, 5, gib=(4, 32))
    by_name = named(*providers)
    found = form(costs, Goal(), NETWORK, providers)
    evened = with_even_memory(costs, Goal(), NETWORK, by_name, found)
    assert evened.score >= (1 - TOLERANCE) * found.score
    for before, after in zip(found.clusters, evened.clusters, strict=True):
        assert after.providers == before.providers and after.in_flight == before.in_flight
        assert fill(after, by_name) <= fill(before, by_name) * (1 + 1e-9) <= 1 + 1e-9
    for before, after in zip(found.rates, evened.rates, strict=True):
        assert after >= (1 - TOLERANCE) * before
