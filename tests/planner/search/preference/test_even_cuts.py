"""Even cuts: no provider takes more of the model than it must, and no block is cut apart for nothing, at about the same
speed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ravnest.planner.cluster import Cluster, cluster_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider, Requester
from ravnest.planner.proposal import proposal_of
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.preference.even_cuts import (
    ABOUT_EQUAL,
    TOLERANCE,
    WORK_SLACK,
    fill,
    with_even_cuts,
)
from ravnest.planner.search.search import form
from tests.planner.instances import random_model, random_providers
from tests.planner.made_up import GIGABYTE, cut_at, machine, model, named
from tests.planner.search.preference.profiles import recommender, residual_network, transformer

NETWORK = Network({}, Requester())
ALONE = Goal(max_clusters=1)


def heavy_crossing(layers: int = 24) -> ModelCosts:
    """A model whose crossings limit every pipeline of home machines, wherever it is cut."""
    return model(layers, layer_seconds=0.001, layer_bytes=4e7, crossing_bytes=5e6)


def test_if_the_lines_are_the_limit_the_stages_become_equal() -> None:
    providers = named(*(machine(name) for name in "abc"))
    uneven = cut_at(heavy_crossing(), ALONE, NETWORK, providers, ("abc", (22, 23)))
    evened = with_even_cuts(heavy_crossing(), ALONE, NETWORK, providers, uneven)
    [before], [after] = uneven.clusters, evened.clusters
    assert fill(after, providers) < 0.55 * fill(before, providers)
    memory = [stage.memory_bytes for stage in after.stages]
    assert max(memory) < 1.15 * sum(memory) / 3, "even but for the size of a layer"
    assert evened.score >= (1 - TOLERANCE) * uneven.score
    assert (after.providers, after.in_flight) == (before.providers, before.in_flight)


def test_a_machine_that_lends_more_memory_takes_more_of_the_model() -> None:
    providers = named(machine("a", memory=4e9), machine("b", memory=12e9))
    uneven = cut_at(heavy_crossing(), ALONE, NETWORK, providers, ("ab", (12,)))
    [after] = with_even_cuts(heavy_crossing(), ALONE, NETWORK, providers, uneven).clusters
    small, large = (stage.memory_bytes for stage in after.stages)
    assert large > 2 * small


def test_no_machine_is_made_the_bottleneck_for_even_memory() -> None:
    # The slow machine has the memory for half of the model, and the time for a quarter.
    providers = named(machine("fast", 3.0), machine("slow", 1.0))
    found = form(model(24), ALONE, NETWORK, list(providers.values()))
    evened = with_even_cuts(model(24), ALONE, NETWORK, providers, found)
    assert evened.score >= (1 - TOLERANCE) * found.score
    owned = {stage.provider: stage.parameter_bytes for stage in evened.clusters[0].stages}
    assert owned["fast"] > 2 * owned["slow"]


@pytest.mark.parametrize("seed", range(8))
def test_it_is_neither_fuller_nor_slower_by_more_than_the_tolerance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, providers = random_model(rng, places=60), random_providers(rng, 5, gib=(4, 32))
    by_name = named(*providers)
    found = form(costs, Goal(), NETWORK, providers)
    evened = with_even_cuts(costs, Goal(), NETWORK, by_name, found)
    assert evened.score >= (1 - TOLERANCE) * found.score
    for before, after in zip(found.clusters, evened.clusters, strict=True):
        assert after.providers == before.providers and after.in_flight == before.in_flight
        assert fill(after, by_name) <= fill(before, by_name) * (1 + ABOUT_EQUAL + 1e-9)
        assert fill(after, by_name) <= 1
    for before, after in zip(found.rates, evened.rates, strict=True):
        assert after >= (1 - TOLERANCE) * before


MODELS: dict[str, Callable[[], ModelCosts]] = {
    "GPT-2": lambda: transformer(12, vocabulary_bytes=154e6),
    "BERT": lambda: transformer(12, vocabulary_bytes=94e6),
    "deep": lambda: transformer(48, vocabulary_bytes=20e6),
    "ResNet-50": residual_network,
    "recommender": recommender,
}


def embedded(count: int, cores: int = 2) -> list[Provider]:
    """So many providers on one machine with few cores."""
    return [Provider(name=f"p{k}", memory_bytes=24 * GIGABYTE, host="here", cores=cores) for k in range(count)]


def evened_of(
    costs: ModelCosts, providers: list[Provider], network: Network = NETWORK
) -> tuple[Cluster, Cluster, float, float]:
    """The cluster of all providers with the fastest cuts and with even ones, and the score of each."""
    found = form(costs, Goal(max_clusters=1, min_stages=len(providers)), network, providers)
    evened = with_even_cuts(costs, Goal(max_clusters=1), network, named(*providers), found)
    return found.clusters[0], evened.clusters[0], found.score, evened.score


def depths(costs: ModelCosts, cluster: Cluster) -> list[float]:
    """For every cut, the modules that it cuts apart."""
    assert costs.module_depth is not None
    return [float(costs.module_depth[costs.places.index(stage.start)]) for stage in cluster.stages[1:]]


def crossing(costs: ModelCosts, cluster: Cluster) -> float:
    return float(sum(costs.forward_bytes[costs.places.index(stage.start)] for stage in cluster.stages[1:]))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", ["one machine", "apart"])
def test_of_any_model_even_cuts_are_about_as_fast_and_hardly_fuller(name: str, count: int, where: str) -> None:
    costs = MODELS[name]()
    providers = embedded(count) if where == "one machine" else [machine(f"p{k}") for k in range(count)]
    before, after, fastest, score = evened_of(costs, providers)
    by_name = named(*providers)
    assert score >= (1 - TOLERANCE) * fastest
    assert fill(after, by_name) <= (1 + ABOUT_EQUAL) * fill(before, by_name)
    assert [stage.parameter_bytes > 0 for stage in after.stages] == count * [True]
    assert after.stages[-1].end == costs.places[-1]


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_machine_with_few_cores_no_stage_works_much_longer_than_on_machines_of_its_own(
    name: str, count: int
) -> None:
    costs, providers = MODELS[name](), embedded(count)
    _, after, _, _ = evened_of(costs, providers)
    fastest = best_cuts(costs, Goal(max_clusters=1, in_flight=after.in_flight), NETWORK, providers)
    assert fastest is not None
    assert after.busiest_seconds <= WORK_SLACK * (1 + ABOUT_EQUAL) * fastest.busiest_seconds


def test_four_stages_on_one_core_share_the_memory() -> None:
    costs, providers = transformer(12, vocabulary_bytes=154e6), embedded(4, cores=1)
    # The root has the embedding and half of the blocks, and the two stems next to nothing.
    uneven = cluster_of(costs, ALONE, NETWORK, providers, (26, 27, 28), 8)
    before = proposal_of(ALONE, NETWORK, named(*providers), [uneven])
    assert before.limit == "the 1 cores of here"
    [after] = with_even_cuts(costs, ALONE, NETWORK, named(*providers), before).clusters
    memory = [stage.memory_bytes for stage in after.stages]
    assert max(memory) < 0.7 * max(stage.memory_bytes for stage in before.clusters[0].stages)
    # A stage owns whole tensors: the embedding is a quarter of the model.
    assert max(memory) < 1.5 * sum(memory) / 4


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_a_deep_transformer_is_cut_between_blocks(count: int) -> None:
    costs = transformer(48, vocabulary_bytes=20e6)
    _, after, _, _ = evened_of(costs, [machine(f"p{k}", mbps=1000) for k in range(count)])
    assert max(depths(costs, after)) <= 1


def test_a_block_is_cut_apart_where_the_rate_needs_it() -> None:
    # Two blocks for two machines, of which one is three times as fast: the boundary between the blocks is too slow.
    costs = transformer(2, vocabulary_bytes=1e6)
    _, after, fastest, score = evened_of(costs, [machine("fast", 3.0, mbps=1000), machine("slow", mbps=1000)])
    assert depths(costs, after) == [2.0] and score >= (1 - TOLERANCE) * fastest


def test_without_names_of_modules_the_bytes_decide_alone() -> None:
    named_costs = transformer(48, vocabulary_bytes=20e6)
    costs = replace(named_costs, module_depth=None)
    _, after, _, _ = evened_of(costs, [machine(f"p{k}", mbps=1000) for k in range(3)])
    hidden = float(costs.forward_bytes[1])
    assert crossing(costs, after) == pytest.approx(2 * hidden), "never inside of an attention or a feed-forward network"


def with_traffic(costs: ModelCosts, **shares: float) -> ModelCosts:
    """The same model with another traffic across some places: `at_5=0.5` halves that across place 5."""
    traffic = costs.forward_bytes.copy()
    for place, share in shares.items():
        traffic[int(place.removeprefix("at_"))] *= share
    return replace(costs, forward_bytes=traffic, backward_bytes=traffic.copy())


def test_of_equally_even_cuts_the_one_with_the_least_traffic_is_taken_and_evenness_comes_first() -> None:
    providers = named(*embedded(2, cores=1))

    def place(costs: ModelCosts) -> int:
        uneven = cut_at(costs, ALONE, NETWORK, providers, (("p0", "p1"), (30,)))
        assert uneven.limit == "the 1 cores of here"
        [after] = with_even_cuts(costs, ALONE, NETWORK, providers, uneven).clusters
        return costs.places.index(after.stages[1].start)

    costs = model(80, layer_seconds=0.001, layer_bytes=4e7, crossing_bytes=1e5)
    even = place(costs)
    assert place(with_traffic(costs, **{f"at_{even + 1}": 0.5})) == even + 1
    assert place(with_traffic(costs, **{f"at_{even + 1}": 0.5, f"at_{even + 8}": 0.1})) == even + 1


@pytest.mark.parametrize("seed", range(3))
def test_sixty_mixed_machines_keep_their_clusters_and_their_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, providers = transformer(24, vocabulary_bytes=8e7), random_providers(rng, 60, gib=(1, 8))
    by_name = named(*providers)
    found = form(costs, Goal(average_every=1000), NETWORK, providers)
    evened = with_even_cuts(costs, Goal(average_every=1000), NETWORK, by_name, found)
    assert len(found.clusters) > 1
    assert evened.score >= (1 - TOLERANCE) * found.score
    assert [c.providers for c in evened.clusters] == [c.providers for c in found.clusters]
    for before, after in zip(found.clusters, evened.clusters, strict=True):
        assert fill(after, by_name) <= min(1.0, (1 + ABOUT_EQUAL) * fill(before, by_name) + 1e-9)
    traffic_before = sum(crossing(costs, cluster) for cluster in found.clusters)
    assert sum(crossing(costs, cluster) for cluster in evened.clusters) <= 1.02 * traffic_before
