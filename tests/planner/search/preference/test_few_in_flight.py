"""Clusters on the cores of one machine have no more in flight than keep the cores busy."""

import pytest

from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.search.preference.few_in_flight import cores_in_use, with_few_in_flight
from ravnest.planner.search.preference.settle import settled
from ravnest.planner.search.search import form
from ravnest.planner.search.split_choice import choose_split
from ravnest.planner.shared_limits import period_on_hosts
from tests.planner.in_flight.flying_pipeline import fixed_rate
from tests.planner.made_up import machine, model, named, planned

ALONE = Goal(max_clusters=1)


def on_one_host(count: int, cores: int) -> dict[str, Provider]:
    return named(*(Provider(name=f"p{k}", memory_bytes=10**10, host="here", cores=cores) for k in range(count)))


@pytest.mark.parametrize(("stages", "cores"), [(4, 2), (8, 2), (8, 4), (6, 4)])
def test_so_few_in_flight_keep_the_shared_cores_busy(stages: int, cores: int) -> None:
    costs, providers = model(24), on_one_host(stages, cores)
    found = planned(costs, ALONE, Network(), providers, tuple(providers))
    fewer, reasons = with_few_in_flight(costs, ALONE, Network(), providers, found)
    before, after = found.clusters[0].in_flight, fewer.clusters[0].in_flight
    assert cores < after <= cores + 2 and after < before
    assert fewer.predicted_samples_per_second == pytest.approx(found.predicted_samples_per_second)
    assert fewer.clusters[0].stages[0].memory_bytes < found.clusters[0].stages[0].memory_bytes
    assert reasons == (
        f"{after} microbatches in flight instead of {before}: more would only wait for the {cores} cores of here",
    )
    [period], [cluster] = period_on_hosts(Network(), providers, fewer.clusters), fewer.clusters
    assert not choose_split(cluster, 1, 10**10, None, period).split, "no stage waits, so it would only cost"
    # A stage alone takes 0.15 s.
    best = cores / (0.15 * stages)
    assert fixed_rate(after, stages=stages, cores=cores) >= 0.95 * best


def test_clusters_that_their_stages_limit_keep_their_number() -> None:
    costs = model(24)
    for providers in (on_one_host(2, 2), named(*(machine(name, mbps=10_000) for name in "abcd"))):
        found = planned(costs, ALONE, Network(), providers, tuple(providers))
        assert with_few_in_flight(costs, ALONE, Network(), providers, found) == (found, ())
        assert cores_in_use(Network(), providers, found.clusters) == (0.0,)


def test_a_number_that_the_job_sets_stays() -> None:
    costs, providers, goal = model(24), on_one_host(4, 2), Goal(max_clusters=1, in_flight=7)
    found = planned(costs, goal, Network(), providers, tuple(providers))
    assert with_few_in_flight(costs, goal, Network(), providers, found) == (found, ())


def test_a_chosen_plan_has_few_in_flight_and_says_why() -> None:
    costs, providers = model(24), on_one_host(4, 2)
    goal = Goal(min_clusters=1, max_clusters=1, min_stages=4, min_providers=4)
    found = form(costs, goal, Network(), list(providers.values()))
    plan = settled(costs, goal, Network(), providers, found)
    assert plan.clusters[0].in_flight == 3 and "3 microbatches in flight instead of" in plan.preferences[0]
    [in_use] = cores_in_use(Network(), providers, plan.clusters)
    assert in_use == pytest.approx(2.0, rel=0.1)
