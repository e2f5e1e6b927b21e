"""Which version policy a run gets, and which stages split their backward: decisions with their reasons."""

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


@pytest.mark.parametrize("versions", POLICIES)
def test_predicted_weights_take_one_version_more_where_more_than_one_is_in_flight(versions: str) -> None:
    model = a_model(1e6, 1e6)
    plain, predicting = (Goal(versions=versions, accumulate=4, max_clusters=1, predicts=p) for p in (False, True))
    more = memory_bytes(model, predicting, 4) - memory_bytes(model, plain, 4)
    parameters = float(model.parameter_bytes[2] - model.parameter_bytes[0])
    assert float(more[0, 2]) == pytest.approx(SPARE * parameters)
    assert float(more[2, -1]) == 0, "nothing is stale at a leaf"
    assert (memory_bytes(model, predicting, 1) == memory_bytes(model, plain, 1)).all()


def test_with_memory_to_spare_everything_is_kept() -> None:
    found = chosen(a_model(1e6, 1e6), PLENTY)
    assert found.goal.versions == "stash"
    assert found.reason == 'versions "stash": memory is no limit'


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
    memory = 1.05 * root_bytes(model, "latest", 12)
    assert memory < root_bytes(model, "recompute", 2)
    found = chosen(model, memory)
    assert found.goal.versions == "latest"
    assert "with the newest weights" in found.reason


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
    assert chosen(model, memory, accumulate=2, in_flight=8).goal.versions == "latest"


def test_a_model_that_fits_with_a_number_in_flight_only_if_less_is_kept() -> None:
    model = a_model(1e9, 1e6)
    memory = 1.05 * root_bytes(model, "latest", 8)
    found = chosen(model, memory, in_flight=8)
    assert found.goal.versions == "latest"
    assert 'with "stash" the model does not fit' in found.reason
    with pytest.raises(PlanError, match=r'What would make it fit: .*pipeline\.versions="latest"'):
        chosen(model, memory, versions="stash", in_flight=8)


def test_a_model_that_does_not_fit_at_all_is_refused_with_what_would_help() -> None:
    with pytest.raises(PlanError, match=r"The model does not fit on the 2 providers: .* it lacks") as refusal:
        chosen(a_model(1e9, 1e6), 1e8)
    assert "pipeline.versions" not in str(refusal.value)


def test_of_policies_that_are_about_as_fast_the_first_is_taken() -> None:
    assert preferred({"stash": 96.0, "recompute": 90.0, "latest": 100.0}) == "stash"
    assert preferred({"stash": 10.0, "recompute": 96.0, "latest": 100.0}) == "recompute"
    assert preferred({"recompute": 94.0, "latest": 100.0}) == "latest"


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
