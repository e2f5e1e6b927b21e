"""Clusters of providers: what a plan keeps to, whatever machines there are."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.planning.bound import upper_bound
from ravnest.errors import PlanError
from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider, Requester
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.search import enough_stand_by, form
from tests.planner.instances import random_model, random_providers

OFTEN = Goal(average_every=1000)
FAST_LINES = Goal(average_every=10**6)


def check(plan: Proposal, model: ModelCosts, providers: list[Provider]) -> None:
    """What every plan promises."""
    by_name = {p.name: p for p in providers}
    seen: list[str] = list(plan.standbys)
    for cluster in plan.clusters:
        seen += cluster.providers
        assert [stage.start for stage in cluster.stages] == [0, *(stage.end for stage in cluster.stages[:-1])]
        assert cluster.stages[-1].end == model.places[-1]
        assert sum(s.parameter_bytes for s in cluster.stages) == pytest.approx(model.parameter_bytes[-1])
        for stage in cluster.stages:
            assert stage.parameter_bytes > 0
            assert stage.memory_bytes <= by_name[stage.provider].memory_bytes
    assert sorted(seen) == sorted(by_name)
    assert plan.score > 0


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), every=st.sampled_from([100, 1000]))
def test_every_provider_has_one_place_and_every_parameter_one_owner_in_each_cluster(
    seed: int, count: int, every: int
) -> None:
    rng = np.random.default_rng(seed)
    model, providers = random_model(rng), random_providers(rng, count)
    try:
        plan = form(model, Goal(average_every=every), Network(), providers)
    except PlanError:
        assume(False)
    check(plan, model, providers)


@pytest.mark.parametrize("count", [12, 60])
def test_plans_of_many_providers_keep_the_same_promises(count: int) -> None:
    rng = np.random.default_rng(count)
    model, providers = random_model(rng, places=33), random_providers(rng, count)
    plan = form(model, OFTEN, Network(), providers)
    check(plan, model, providers)
    assert len(plan.clusters) > 1
    assert plan.score <= upper_bound(model, OFTEN, Network(), providers)


@pytest.mark.parametrize("count", [5, 14])
def test_the_same_seed_gives_the_same_plan_in_whatever_order_providers_are_given(count: int) -> None:
    rng = np.random.default_rng(3)
    model, providers = random_model(rng), random_providers(rng, count)
    assert form(model, OFTEN, Network(), providers, seed=4) == form(model, OFTEN, Network(), providers[::-1], seed=4)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), reliability=st.sampled_from([1.0, 1.0, 0.8]))
def test_one_more_machine_never_makes_the_prediction_of_few_worse(seed: int, reliability: float) -> None:
    rng = np.random.default_rng(seed)
    model, providers = random_model(rng), random_providers(rng, 5, gib=(2, 6), reliability=reliability)
    scores = [form(model, OFTEN, Network(), providers[:count]).score for count in (3, 4, 5)]
    # Estimates choose what gets exact cuts; a hair of the optimum may be lost there.
    assert scores[1] >= 0.99 * scores[0]
    assert scores[2] >= 0.99 * scores[1]


def test_a_plan_of_many_is_no_worse_than_a_known_one_without_the_newcomer() -> None:
    rng = np.random.default_rng(8)
    model, providers = random_model(rng), random_providers(rng, 13)
    before = form(model, OFTEN, Network(), providers[:12])
    after = form(model, OFTEN, Network(), providers, seconds=0.0, known=before.clusters)
    assert after.score >= before.score
    check(after, model, providers)
    without_one = form(model, OFTEN, Network(), providers[1:], seconds=0.0, known=before.clusters)
    check(without_one, model, providers[1:])


def test_reliable_machines_all_work_where_that_is_faster() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=1e7)
    providers = [Provider(name=f"p{i}", memory_bytes=8 * 2**30) for i in range(4)]
    plan = form(model, Goal(), Network(), providers)
    assert plan.standbys == ()
    assert len(plan.clusters) == 4


@pytest.mark.parametrize("count", [6, 12])
def test_as_many_stand_by_as_will_be_missing_with_memory_for_some_stage(count: int) -> None:
    rng = np.random.default_rng(1)
    model, providers = random_model(rng), random_providers(rng, count, gib=(2, 6), reliability=0.8)
    plan = form(model, OFTEN, Network(), providers)
    absent = math.ceil(0.2 * count - 1e-9)
    assert enough_stand_by(providers, plan.clusters)
    least = min(stage.memory_bytes for cluster in plan.clusters for stage in cluster.stages)
    ready = [p for p in providers if p.name in plan.standbys and p.memory_bytes >= least]
    assert len(ready) >= absent
    check(plan, model, providers)


def test_nobody_is_held_back_whom_the_model_needs() -> None:
    model = random_model(np.random.default_rng(0))
    whole = float(memory_bytes(model, Goal(), 1)[0, -1])
    half = [replace(_home(name), memory_bytes=int(0.75 * whole), reliability=0.5) for name in "ab"]
    plan = form(model, Goal(in_flight=1), Network(), half)
    assert plan.standbys == ()


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("count", [6, 12])
def test_there_are_no_more_clusters_than_asked_for(most: int, count: int) -> None:
    rng = np.random.default_rng(4)
    model, providers = random_model(rng), random_providers(rng, count)
    plan = form(model, replace(FAST_LINES, max_clusters=most), Network(), providers)
    assert len(plan.clusters) <= most
    check(plan, model, providers)


@pytest.mark.parametrize("count", [1, 3, 6, 10])
def test_one_cluster_of_everybody_has_a_stage_for_each(count: int) -> None:
    rng = np.random.default_rng(6)
    model, providers = random_model(rng, parameter_bytes=1e8), random_providers(rng, count)
    plan = form(model, Goal(max_clusters=1, min_stages=count), Network(), providers)
    assert plan.standbys == ()
    assert len(plan.clusters[0].stages) == count
    check(plan, model, providers)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 8), data=st.data())
def test_so_many_clusters_are_made_of_all_few_providers(seed: int, count: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    clusters = data.draw(st.integers(2, count))
    model, providers = random_model(rng, parameter_bytes=1e8), random_providers(rng, count, gib=(2, 6))
    plan = form(model, _exactly(clusters, count), Network(), providers)
    check(plan, model, providers)
    _is_exactly(plan, clusters, count)


@pytest.mark.parametrize(("count", "clusters"), [(9, 2), (10, 4), (17, 17), (23, 3), (60, 7)])
@pytest.mark.parametrize("host", ["", "host"])
def test_so_many_clusters_are_made_of_all_many_providers(count: int, clusters: int, host: str) -> None:
    rng = np.random.default_rng(count)
    model = random_model(rng, places=33, parameter_bytes=1e8)
    providers = [replace(p, host=host, cores=2) for p in random_providers(rng, count, gib=(2, 6))]
    plan = form(model, _exactly(clusters, count), Network(), providers)
    check(plan, model, providers)
    _is_exactly(plan, clusters, count)
    assert plan == form(model, _exactly(clusters, count), Network(), providers[::-1])


@pytest.mark.parametrize("count", [6, 20])
def test_so_many_clusters_may_leave_out_whom_they_do_not_need(count: int) -> None:
    rng = np.random.default_rng(4)
    model, providers = random_model(rng, parameter_bytes=1e8), random_providers(rng, count)
    # One is so slow that nobody wants it.
    providers[0] = replace(providers[0], compute_speed=1e-3, memory_speed=1e-3)
    for clusters in (2, 3):
        goal = Goal(min_clusters=clusters, max_clusters=clusters)
        plan = form(model, goal, Network(), providers)
        check(plan, model, providers)
        assert len(plan.clusters) == clusters and providers[0].name in plan.standbys


@pytest.mark.parametrize("count", [8, 12])
def test_so_many_clusters_are_nearly_as_good_as_a_free_choice_that_takes_as_many(count: int) -> None:
    rng = np.random.default_rng(2)
    model, providers = random_model(rng), random_providers(rng, count)
    free = form(model, OFTEN, Network(), providers)
    clusters = len(free.clusters)
    assert clusters > 1
    goal = replace(OFTEN, min_clusters=clusters, max_clusters=clusters)
    assert form(model, goal, Network(), providers).score >= 0.9 * free.score


def test_unequal_memory_is_dealt_so_that_every_cluster_fits() -> None:
    model = random_model(np.random.default_rng(0), places=33, parameter_bytes=1e9)
    whole = float(memory_bytes(model, Goal(in_flight=1), 1)[0, -1])
    large = [replace(_home(f"large{i}"), memory_bytes=int(0.9 * whole)) for i in range(5)]
    small = [replace(_home(f"small{i}"), memory_bytes=int(0.3 * whole)) for i in range(5)]
    plan = form(model, replace(_exactly(5, 10), in_flight=1), Network(), [*large, *small])
    check(plan, model, [*large, *small])
    _is_exactly(plan, 5, 10)


def test_clusters_that_cannot_be_are_refused_with_the_reason_and_the_way_out() -> None:
    model = random_model(np.random.default_rng(0), places=4, parameter_bytes=1e9)
    homes = [_home(f"p{i}") for i in range(8)]
    with pytest.raises(PlanError, match=r"to be 3 clusters, and there are 2 providers: .* fewer clusters"):
        form(model, Goal(min_clusters=3, max_clusters=3), Network(), homes[:2])
    with pytest.raises(PlanError, match=r"at most 3 stages, .* 2 clusters have work for 6 providers, not 8: .* 6 or"):
        form(model, _exactly(2, 8), Network(), homes)
    whole = float(memory_bytes(model, Goal(), 1)[0, -1])
    tight = [replace(p, memory_bytes=int(0.8 * whole)) for p in homes]
    form(model, Goal(), Network(), tight[:2])
    with pytest.raises(
        PlanError, match=r"does not fit 2 times on the 2 providers: a copy takes about .* fewer cluster"
    ):
        form(model, _exactly(2, 2), Network(), tight[:2])
    with pytest.raises(PlanError, match=r"does not fit 2 times on the 3 providers"):
        form(model, Goal(min_clusters=2, max_clusters=2), Network(), tight[:3])
    tiny = replace(homes[0], memory_bytes=1000)
    with pytest.raises(PlanError, match=r"Not all of 4 providers can have a stage: .* p0 has less"):
        form(model, _exactly(2, 4), Network(), [tiny, *homes[1:4]])
    with pytest.raises(PlanError, match=r"does not fit on the 2 providers: .* it lacks"):
        form(model, _exactly(2, 2), Network(), [tiny, replace(tiny, name="p1")])


@pytest.mark.parametrize("count", [4, 12])
def test_what_averaging_keeps_counts_where_there_are_several_clusters_and_only_there(count: int) -> None:
    model = random_model(np.random.default_rng(0), places=33, parameter_bytes=1e9)
    whole = float(memory_bytes(model, Goal(), 1)[0, -1])
    alone = [replace(_home(f"p{i:02}"), memory_bytes=int(1.02 * whole)) for i in range(count)]
    kept = Goal(average_every=10**6, average_memory=4.0)
    plan = form(model, kept, Network(), alone)
    check(plan, model, alone)
    for cluster in plan.clusters:
        # Without averaging each of them would hold the model by itself.
        assert len(cluster.stages) > 1 or len(plan.clusters) == 1
    free = form(model, replace(kept, average_memory=0.0), Network(), alone)
    assert len(free.clusters) == count
    single = form(model, kept, Network(), alone[:1])
    assert len(single.clusters) == 1 and single.clusters[0].stages[0].memory_bytes == pytest.approx(whole)
    assert form(model, replace(kept, max_clusters=1), Network(), alone).score <= plan.score


def _exactly(clusters: int, providers: int) -> Goal:
    return Goal(
        min_clusters=clusters,
        max_clusters=clusters,
        min_stages=providers // clusters,
        min_providers=providers,
    )


def _is_exactly(plan: Proposal, clusters: int, providers: int) -> None:
    sizes = [len(cluster.stages) for cluster in plan.clusters]
    assert (len(sizes), sum(sizes)) == (clusters, providers)
    assert min(sizes) >= providers // clusters


def test_more_stages_than_the_model_has_are_refused_with_the_most_there_can_be() -> None:
    model = random_model(np.random.default_rng(0), places=4)
    with pytest.raises(PlanError, match="at most 3 stages"):
        form(model, Goal(max_clusters=1, min_stages=4), Network(), [_home(n) for n in "abcd"])
    with pytest.raises(PlanError, match="at least 3 stages, and there are 2 providers"):
        form(model, Goal(min_stages=3), Network(), [_home(n) for n in "ab"])


def test_providers_of_one_host_do_not_count_its_cores_twice() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=1e7)
    apart = [Provider(name=n, memory_bytes=8 * 2**30, cores=2, threads=2) for n in "ab"]
    together = [replace(p, host="host") for p in apart]
    rate = form(model, Goal(), Network(), apart[:1]).score
    assert form(model, Goal(), Network(), apart).score == pytest.approx(2 * rate)
    assert form(model, Goal(), Network(), together).score <= 1.05 * rate


def test_a_requester_on_a_slow_line_is_not_fed_from_by_more_than_it_can_send() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=1e7)
    providers = [_home(n) for n in "abcd"]
    slow = Network(requester=Requester(up_bytes_per_second=1e5, down_bytes_per_second=1e5))
    plan = form(model, Goal(), slow, providers)
    fed = sum(
        rate / model.samples * sum(s.fed_bytes + s.relayed_bytes for s in cluster.stages)
        for rate, cluster in zip(plan.rates, plan.clusters, strict=True)
    )
    assert fed <= 1e5 * (1 + 1e-6)


def test_many_providers_of_one_host_are_planned_with_the_cores_it_has() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=1e7)
    alone = Provider(name="p", memory_bytes=8 * 2**30, host="host", cores=2, threads=1)
    crowd = [replace(alone, name=f"p{i:02d}") for i in range(10)]
    rate = form(model, Goal(), Network(), [alone]).score
    plan = form(model, Goal(), Network(), crowd)
    assert plan.score == pytest.approx(2 * rate, rel=0.05)
    check(plan, model, crowd)


def test_many_providers_leave_out_what_would_only_load_the_requesters_line() -> None:
    rng = np.random.default_rng(3)
    model = random_model(rng)
    providers = [replace(p, reachable=i % 2 == 0) for i, p in enumerate(random_providers(rng, 24))]
    free = form(model, OFTEN, Network(), providers)
    line = Requester(up_bytes_per_second=3e6, down_bytes_per_second=3e6)
    plan = form(model, OFTEN, Network(requester=line), providers)
    relayed = sum(stage.relayed_bytes > 0 for cluster in plan.clusters for stage in cluster.stages)
    assert relayed <= 2
    assert 0.5 * free.score <= plan.score <= free.score * 1.05
    check(plan, model, providers)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_model_that_does_not_fit_says_by_how_much_and_what_would_help(count: int) -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=2e10)
    small = [replace(_home(f"p{i}"), memory_bytes=2**30) for i in range(count)]
    with pytest.raises(
        PlanError, match=r"lacks [\d.]+ GiB on p\d+, whose stage takes .* more (machine|memory)"
    ) as raised:
        form(model, Goal(), Network(), small)
    lacking = float(str(raised.value).split("lacks ")[1].split(" GiB")[0])
    more = [replace(p, memory_bytes=p.memory_bytes + int((lacking + 0.02) * 2**30)) for p in small]
    check(form(model, Goal(), Network(), more), model, more)


def test_what_is_said_to_make_it_fit_does() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=2e9)
    providers = [replace(_home(n), memory_bytes=4 * 2**30) for n in "ab"]
    with pytest.raises(PlanError, match=r"one more machine of ([\d.]+) GiB") as raised:
        form(model, Goal(), Network(), providers)
    size = float(str(raised.value).split("one more machine of ")[1].split(" GiB")[0])
    more = [*providers, replace(_home("c"), memory_bytes=int((size + 0.02) * 2**30))]
    check(form(model, Goal(), Network(), more), model, more)


def test_too_many_in_flight_are_named_where_they_are_what_does_not_fit() -> None:
    model = random_model(np.random.default_rng(0), parameter_bytes=2e9)
    providers = [replace(_home(n), memory_bytes=5 * 2**30) for n in "abc"]
    form(model, Goal(in_flight=1), Network(), providers)
    with pytest.raises(PlanError, match=r"pipeline\.in_flight=1"):
        form(model, Goal(in_flight=8), Network(), providers)


def test_time_for_a_search_is_kept_to() -> None:
    rng = np.random.default_rng(1)
    model, providers = random_model(rng), random_providers(rng, 30)
    check(form(model, OFTEN, Network(), providers, seconds=0.0), model, providers)


def test_like_machines_come_together() -> None:
    model = random_model(np.random.default_rng(0))
    fast = [replace(_home(f"fast{i}"), compute_speed=4.0, memory_speed=4.0) for i in range(2)]
    slow = [_home(f"slow{i}") for i in range(2)]
    providers = [replace(p, memory_bytes=int(1.6 * 2**30)) for p in (*fast, *slow)]
    plan = form(model, FAST_LINES, Network(), providers)
    by_name = {p.name: p for p in providers}
    for cluster in plan.clusters:
        members = [by_name[name] for name in cluster.providers]
        assert len({p.compute_speed for p in members}) == len({p.up_bytes_per_second for p in members}) == 1


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 5), every=st.sampled_from([100, 1000]))
def test_no_plan_exceeds_the_upper_bound(seed: int, count: int, every: int) -> None:
    rng = np.random.default_rng(seed)
    model, providers, goal = random_model(rng), random_providers(rng, count), Goal(average_every=every)
    try:
        plan = form(model, goal, Network(), providers)
    except PlanError:
        assume(False)
    assert plan.score <= upper_bound(model, goal, Network(), providers) * (1 + 1e-4)


def _home(name: str) -> Provider:
    return Provider(
        name=name,
        memory_bytes=8 * 2**30,
        up_bytes_per_second=1e7,
        down_bytes_per_second=1e7,
        latency_seconds=0.01,
    )
