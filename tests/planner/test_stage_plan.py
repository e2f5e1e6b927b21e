"""The predicted rate follows from what was measured, and says what limits it."""

from dataclasses import replace

import pytest

from ravnest.graph.profile import CostProfile, NodeCost
from ravnest.graph.update_cost import UpdateCost
from ravnest.planner.stage_plan import FRAME_SECONDS, Plan, ProviderProfile, plan_cluster, role_of
from tests.graph.cutting import example

SAMPLES = 10


def costs(seconds: float, update: UpdateCost | None = None) -> CostProfile:
    """Every operator of the model takes so long."""
    nodes = {n.name: NodeCost(seconds, 0.0, 0, 0) for n in example("resnet").graph.nodes}
    return CostProfile(nodes, SAMPLES, 1, update or UpdateCost())


def providers(count: int, cores: int = 16, hosts: int = 1, threads: int = 1) -> tuple[ProviderProfile, ...]:
    return tuple(ProviderProfile(f"p{i}", f"host-{i % hosts}", cores, threads) for i in range(count))


def planned(profile: CostProfile, nodes: tuple[ProviderProfile, ...], coordinator_host: str = "") -> Plan:
    return plan_cluster(example("resnet").graph, profile, nodes, coordinator_host)


def test_each_provider_gets_a_stage_and_its_role_in_order() -> None:
    plan = planned(costs(1.0), providers(3))
    assert [(s.node, s.stage, s.role) for s in plan.stages] == [("p0", 0, "root"), ("p1", 1, "stem"), ("p2", 2, "leaf")]
    assert len(plan.places) == 2 and list(plan.places) == sorted(plan.places)
    assert role_of(0, 1) == "root+leaf"


def test_the_slowest_stage_sets_the_rate_where_cores_are_plenty() -> None:
    plan = planned(costs(1.0), providers(3, hosts=3))
    slowest = max(plan.stages, key=lambda s: s.seconds)
    assert plan.predicted_samples_per_second == pytest.approx(SAMPLES / slowest.seconds, rel=0.01)
    assert f"stage {slowest.stage} limits it" in plan.reason


def test_stages_on_one_host_share_its_cores() -> None:
    alone, together = planned(costs(1.0), providers(4, cores=4)), planned(costs(1.0), providers(4, cores=1))
    total = sum(s.seconds for s in together.stages)
    assert together.predicted_samples_per_second == pytest.approx(SAMPLES / total, rel=0.01)
    assert alone.predicted_samples_per_second > 2 * together.predicted_samples_per_second
    assert "the 1 cores of host-0" in together.reason


def test_frames_limit_a_tiny_model_and_the_coordinators_count_where_it_shares_the_host() -> None:
    tiny = costs(1e-9)
    apart, beside = (planned(tiny, providers(3, cores=1), host) for host in ("elsewhere", "host-0"))
    frames = sum(s.frames for s in apart.stages)
    assert [s.frames for s in apart.stages] == [4, 4, 3]
    assert apart.predicted_samples_per_second == pytest.approx(SAMPLES / (frames * FRAME_SECONDS), rel=0.01)
    # It feeds the root and the leaf and hears of each microbatch that is done.
    assert beside.predicted_samples_per_second == pytest.approx(SAMPLES / ((frames + 3) * FRAME_SECONDS), rel=0.01)


def test_a_single_stage_is_fed_and_says_when_it_is_done() -> None:
    assert [s.frames for s in planned(costs(1.0), providers(1)).stages] == [2]


def test_updates_cost_time_and_move_the_cuts() -> None:
    early = costs(1e-9)
    first = [node.name for node in example("resnet").graph.nodes][:6]
    early = replace(early, nodes={**early.nodes, **{name: NodeCost(1e-3, 0.0, 0, 0) for name in first}})
    by_work = planned(early, providers(2, hosts=2))
    by_bytes = planned(replace(early, update=UpdateCost(byte_seconds=1e-3)), providers(2, hosts=2))
    assert by_bytes.predicted_samples_per_second < by_work.predicted_samples_per_second
    assert by_bytes.places[0] > by_work.places[0]


def test_more_threads_take_more_of_a_shared_host() -> None:
    one, two = (planned(costs(1.0), providers(2, cores=2, threads=threads)) for threads in (1, 2))
    assert two.predicted_samples_per_second < one.predicted_samples_per_second
    assert replace(two, predicted_samples_per_second=0, reason="") == replace(
        one, predicted_samples_per_second=0, reason=""
    )
