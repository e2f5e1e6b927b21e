"""Which version policy a run gets, and which stages split their backward: decisions with their reasons."""

import re
from dataclasses import replace

import numpy as np
import pytest

from ravnest.errors import PlanError
from ravnest.planner.cluster import SPARE, Cluster, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.search import form
from ravnest.planner.search.split_choice import choose_split
from ravnest.planner.search.version_choice import VersionChoice, choose_versions, preferred
from ravnest.version_policy import POLICIES

PLENTY = 1 << 50
BEHIND = 0.05
"""Seconds one way: so far are the machines from one another."""


def a_model(parameters: float, activations: float) -> ModelCosts:
    """Four layers alike, with so many bytes of each; little crosses between them."""
    places = 5
    steps = np.arange(places, dtype=float)
    crossing = np.array([0.0, 1e3, 1e3, 1e3, 0.0])
    return ModelCosts(
        places=tuple(range(places)),
        heavy_seconds=0.01 * steps,
        light_seconds=0.0 * steps,
        heavy_forward_seconds=0.003 * steps,
        light_forward_seconds=0.0 * steps,
        parameter_bytes=parameters * steps,
        parameters=steps,
        saved_bytes=activations * steps,
        forward_bytes=crossing,
        backward_bytes=crossing,
        input_bytes=(1e3,),
        input_uses=np.array([[0.0, 1.0, 1.0, 1.0, 1.0]]),
        samples=8,
    )


def machines(memory: float) -> list[Provider]:
    return [Provider(name=name, memory_bytes=int(memory), latency_seconds=BEHIND) for name in "ab"]


def chosen(model: ModelCosts, memory: float, versions: str | None = None, **more: object) -> VersionChoice:
    providers = machines(memory)
    goal = Goal(max_clusters=1, min_stages=2, **more)  # type: ignore[arg-type]

    def search(goal: Goal) -> Proposal:
        return form(model, goal, Network(), providers)

    return choose_versions(model, goal, providers, versions, search)


def root_bytes(model: ModelCosts, versions: str, in_flight: int, accumulate: int = 1) -> float:
    """What the first half of the model takes."""
    goal = Goal(versions=versions, accumulate=accumulate, max_clusters=1)
    return float(memory_bytes(model, goal, in_flight)[0, 2])


@pytest.mark.parametrize(
    ("versions", "copies"),
    [("stash", 1), ("double", 1), ("stash_8bit", 0.254), ("recompute", 1), ("in_place", 0), ("latest", 0)],
)
def test_predicted_weights_take_one_version_more_where_they_are_kept(versions: str, copies: float) -> None:
    model = a_model(1e6, 1e6)
    plain, predicting = (Goal(versions=versions, accumulate=4, max_clusters=1, predicts=p) for p in (False, True))
    more = memory_bytes(model, predicting, 4) - memory_bytes(model, plain, 4)
    parameters = float(model.parameter_bytes[2] - model.parameter_bytes[0])
    assert float(more[0, 2]) == pytest.approx(SPARE * copies * parameters)
    assert float(more[2, -1]) == 0, "nothing is stale at a leaf"
    assert (memory_bytes(model, predicting, 1) == memory_bytes(model, plain, 1)).all()


def test_with_memory_to_spare_everything_is_kept() -> None:
    found = chosen(a_model(1e6, 1e6), PLENTY)
    assert found.goal.versions == "stash"
    assert re.fullmatch(r'versions "stash": older weights take [\d.]+ Mi?B of a stage at most', found.reason)


def test_with_memory_to_spare_large_weights_are_kept_in_8_bits_for_the_same_loss() -> None:
    found = chosen(a_model(1e9, 1e6), PLENTY, predicts=True)
    assert found.goal.versions == "stash_8bit"
    assert re.match(r'versions "stash_8bit": older weights take [\d.]+ Gi?B of a stage at most in 8 bits', found.reason)
    assert re.search(r", instead of [\d.]+ Gi?B, and the loss stays the same ", found.reason)


def test_where_activations_are_much_larger_than_weights_these_are_kept_exactly() -> None:
    assert chosen(a_model(1e9, 100e9), PLENTY).goal.versions == "stash"


def test_with_one_in_flight_nothing_is_kept_so_nothing_is_coded() -> None:
    found = chosen(a_model(1e9, 1e6), PLENTY, in_flight=1)
    assert found.reason == 'versions "stash": with one microbatch in flight, no older weights are kept'


def test_what_the_job_says_is_done() -> None:
    found = chosen(a_model(1e6, 1e6), PLENTY, versions="latest")
    assert found.goal.versions == "latest"
    assert found.reason == 'versions "latest", as pipeline.versions says'


def test_where_activations_are_too_large_they_are_computed_again() -> None:
    model = a_model(1e6, 1e9)
    memory = 1.05 * root_bytes(model, "recompute", 12)
    assert memory < root_bytes(model, "stash", 2)
    found = chosen(model, memory)
    assert found.goal.versions == "recompute"
    assert found.plan.clusters[0].in_flight > 2
    assert 'with "stash" fewer microbatches can be in flight, so activations are computed a second time' in found.reason


def test_where_weights_are_too_large_none_are_kept() -> None:
    model = a_model(1e9, 1e6)
    memory = 1.05 * root_bytes(model, "in_place", 12)
    assert memory < root_bytes(model, "stash_8bit", 2)
    found = chosen(model, memory)
    assert found.goal.versions == "in_place"
    assert "so a backward uses the newest weights, at about 0.03 more loss (samples/s: " in found.reason


def test_where_weights_and_activations_are_too_large_neither_is_kept() -> None:
    model = a_model(1e9, 1e9)
    memory = 1.05 * root_bytes(model, "latest", 12)
    assert memory < min(root_bytes(model, name, 2) for name in POLICIES if name != "latest")
    found = chosen(model, memory)
    assert found.goal.versions == "latest"
    assert "with the newest weights, at about 0.04 more loss" in found.reason


def test_two_versions_do_where_an_update_takes_enough_microbatches() -> None:
    model = a_model(1e9, 1e6)
    memory = 1.05 * root_bytes(model, "double", 16, accumulate=16)
    assert memory < root_bytes(model, "stash", 3, accumulate=16)
    found = chosen(model, memory, accumulate=16)
    assert found.goal.versions == "double"
    assert found.plan.clusters[0].in_flight <= 16
    assert found.goal.bound_in_flight == 16


def test_two_versions_do_not_go_with_more_in_flight_than_make_an_update() -> None:
    model = a_model(1e9, 1e6)
    memory = 1.05 * root_bytes(model, "double", 16, accumulate=16)
    assert chosen(model, memory, accumulate=2, in_flight=8).goal.versions == "in_place"


def test_a_model_that_fits_with_a_number_in_flight_only_if_less_is_kept() -> None:
    model = a_model(1e9, 1e6)
    memory = 1.01 * root_bytes(model, "stash_8bit", 8)
    found = chosen(model, memory, in_flight=8)
    assert found.goal.versions == "stash_8bit"
    assert 'with "stash" the model does not fit, so older weights are kept in 8 bits (samples/s: ' in found.reason
    with pytest.raises(PlanError, match=r'What would make it fit: .*pipeline\.versions="stash_8bit"'):
        chosen(model, memory, versions="stash", in_flight=8)


def test_a_model_that_does_not_fit_at_all_is_refused_with_what_would_help() -> None:
    with pytest.raises(PlanError, match=r"The model does not fit on the 2 providers: .* it lacks") as refusal:
        chosen(a_model(1e9, 1e6), 1e8)
    assert "pipeline.versions" not in str(refusal.value)


def test_the_least_loss_wins_unless_it_is_much_slower() -> None:
    def of(**scores: float) -> str:
        return preferred(scores, dict.fromkeys(POLICIES, 1.0), ())

    assert of(stash=96, recompute=90, latest=100) == "stash"
    assert of(stash=10, recompute=96, latest=100) == "recompute"
    assert of(recompute=81, latest=100) == "recompute"
    assert of(recompute=79, in_place=85, latest=100) == "in_place"
    assert of(recompute=79, in_place=79, latest=100) == "latest"


def test_of_equal_loss_and_speed_the_first_with_small_versions_wins_or_the_least_memory() -> None:
    scores = {"stash": 100.0, "stash_8bit": 97.0, "in_place": 110.0}
    sizes = {"stash": 9.0, "stash_8bit": 5.0, "in_place": 3.0}
    assert preferred(scores, sizes, {"stash", "stash_8bit"}) == "stash"
    assert preferred(scores, sizes, {"in_place"}) == "stash_8bit"
    assert preferred(scores | {"stash_8bit": 94.0}, sizes, ()) == "stash"


def a_cluster(in_flight: int | None, memory: float = PLENTY) -> Cluster:
    found = best_cuts(a_model(1e6, 1e9), Goal(in_flight=in_flight), Network(), machines(memory))
    assert found is not None
    return found


def test_backwards_are_split_where_stages_wait_for_microbatches_to_come_back() -> None:
    assert choose_split(a_cluster(1), 1, PLENTY, None).split
    assert not choose_split(a_cluster(1), 0, PLENTY, None).split, "a root sends no gradients"
    kept_busy = choose_split(a_cluster(None), 1, PLENTY, None)
    assert not kept_busy.split and kept_busy.reason.startswith("enough are in flight")


def test_backwards_are_split_only_where_there_is_memory_for_it() -> None:
    cluster = a_cluster(1)
    held = cluster.stages[1].memory_bytes
    short = choose_split(cluster, 1, held, None)
    assert not short.split and short.reason.startswith("there is no memory")
    assert choose_split(replace(cluster), 1, 2 * held, None).split


@pytest.mark.parametrize("asked", [True, False])
def test_a_job_decides_for_all_stages_but_the_root(asked: bool) -> None:
    assert choose_split(a_cluster(None), 1, PLENTY, asked) == (asked, f"pipeline.split_backward is {asked}")
    assert not choose_split(a_cluster(None), 0, PLENTY, asked).split
