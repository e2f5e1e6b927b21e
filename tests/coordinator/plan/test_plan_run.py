"""What members said of themselves becomes what the planner takes; what it needs to know of lines is measured."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest import Averaging, Job, Pipeline
from ravnest.coordinator.plan.feed_ahead import feed_ahead
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.plan_run import (
    RunPlanner,
    check_stages,
    goal_of,
    lines_to_measure,
    model_costs,
    plan_members,
)
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.coordinator.plan.provider_profiles import (
    Machine,
    StatedLine,
    measured_lines,
    provider_of,
    requester_of,
)
from ravnest.coordinator.swarm.members import LentMachine, LinkMeasurement, Member, Members
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.engine.speed.device_speed import Speed
from ravnest.errors import PeerError, PlanError
from ravnest.graph.profile import CostProfile
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.planner.averaging import BLOCKING_SHARE, MAX_SLOWDOWN, MIN_UPDATES, ROUND_SHARE, average_every
from ravnest.planner.cluster import memory_bytes
from ravnest.planner.in_flight.lr_bound import CAUTIOUS_STALENESS
from ravnest.planner.plan import Plan, RingStages
from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.planner.reliability import Attendance
from ravnest.planner.rings.round_time import RoundTime
from ravnest.planner.rings.tensors import RingTensors
from ravnest.preview.nodes_file import read_nodes
from tests.builders import a_plan, cluster_plan, stage_plan

SPEED_FIGURES = tuple(field.name for field in fields(Speed))
HERE = Machine(cores=4, threads=2)
COSTS = CostProfile({}, samples=8, threads=1, flops_per_second=100e9, memory_bytes_per_second=10e9)
REACHED, NOT_REACHED = Reach("10.0.0.1:7000", "it answers"), Reach("", "nobody answers")


def member(
    name: str = "anna",
    address: str = "10.0.0.1:7000",
    link: LinkSpeed | None = None,
    seen_host: str = "10.0.0.1",
    **facts: object,
) -> Member:
    speed = Speed(*(facts.pop(figure, 0.0) for figure in SPEED_FIGURES))  # type: ignore[arg-type]
    lent = {"device": "cpu", "memory_bytes": 8 << 30, "threads": 3, "cores": 6, "speed": speed, **facts}
    return Member(
        name,
        address,
        LentMachine(**lent),  # type: ignore[arg-type]
        seen_host=seen_host,
        link=LinkMeasurement(speed=link),
    )


@pytest.fixture(scope="module")
def prepared() -> PreparedJob:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    batches = [(torch.randn(8, 64), torch.randint(0, 64, (8,))) for _ in range(2)]
    job = Job(model=nn.Sequential(*layers), loss=F.cross_entropy, train_data=batches, optimizer=torch.optim.SGD)
    return prepare(job, 1, None, lambda phase: None)


def test_a_machine_is_as_fast_as_it_measured_against_the_one_that_profiled_the_model() -> None:
    measured = member(flops_per_second=50e9, memory_bytes_per_second=30e9, link=LinkSpeed(0.04, 5e6, 20e6))
    provider = provider_of(measured, COSTS, REACHED, HERE)
    assert (provider.compute_speed, provider.memory_speed) == (0.5, 3.0)
    assert (provider.up_bytes_per_second, provider.down_bytes_per_second) == (5e6, 20e6)
    assert provider.latency_seconds == 0.02 and provider.reachable
    assert provider.machine == "anna" and (provider.cores, provider.threads) == (6, 3)
    assert not provider_of(measured, COSTS, NOT_REACHED, HERE).reachable


def test_what_was_not_measured_is_taken_to_be_as_fast() -> None:
    provider = provider_of(member(), COSTS, REACHED, HERE)
    assert provider.compute_speed == provider.memory_speed == 1.0
    assert provider_of(member(slower=4.0), COSTS, REACHED, HERE).compute_speed == 0.25
    assert provider_of(member(flops_per_second=5.0), replace(COSTS, flops_per_second=0.0), REACHED, HERE) == provider


def test_in_mixed_precision_a_machine_is_as_fast_as_it_measured_in_that() -> None:
    costs = replace(COSTS, precision="bfloat16", precision_speed=0.25)
    gpu = member(flops_per_second=500e9, bfloat16_flops_per_second=2000e9, memory_bytes_per_second=30e9)
    assert provider_of(gpu, COSTS, REACHED, HERE).compute_speed == 5.0
    assert provider_of(gpu, costs, REACHED, HERE).compute_speed == 20.0
    assert provider_of(gpu, costs, REACHED, HERE).memory_speed == 3.0
    # One that has not measured it is believed to gain nothing by it; one that is this machine, what this one does.
    assert provider_of(member(flops_per_second=500e9), costs, REACHED, HERE).compute_speed == 5.0
    assert provider_of(member(), costs, REACHED, HERE).compute_speed == 0.25
    assert provider_of(member(slower=5.0), costs, REACHED, HERE).compute_speed == 0.05


def test_products_in_mixed_precision_are_measured_against_float32(prepared: PreparedJob) -> None:
    job = replace(prepared.job, pipeline=Pipeline(precision="bfloat16"))
    half = prepare(job, 1, None, lambda phase: None).costs
    assert half.precision == "bfloat16" and half.precision_speed > 0 and half.precision_speed != 1.0
    assert prepared.costs.precision == "float32" and prepared.costs.precision_speed == 1.0


def test_a_model_too_large_for_a_whole_step_is_taken_to_gain_nothing_by_mixed_precision(
    prepared: PreparedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    # Another optimizer: nothing of it has been measured.
    job = replace(prepared.job, optimizer=torch.optim.Adagrad, pipeline=Pipeline(precision="bfloat16"))
    costs = prepare(job, 1, None, lambda phase: None).costs
    assert (costs.precision, costs.precision_speed) == ("bfloat16", 1.0)


def test_a_run_with_fewer_in_flight_at_first_is_predicted_with_them(
    prepared: PreparedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = [
        Provider(name=name, memory_bytes=8 << 30, latency_seconds=0.05, up_bytes_per_second=1e8, cores=1)
        for name in ("anna", "ben", "cleo")
    ]
    goal = Goal(min_stages=3, max_clusters=1)
    plain = plan_members(prepared, far, Network(), goal)
    assert plain.slowed == 1.0 and "fewer in flight" not in plain.reason
    adam = partial(torch.optim.AdamW, lr=1e-3)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2)
    job = replace(prepared.job, optimizer=adam, schedule=cosine, epochs=1)
    slower = plan_members(replace(prepared, job=job), far, Network(), goal)
    assert slower.steady_samples_per_second == plain.steady_samples_per_second
    assert slower.clusters[0].in_flight == plain.clusters[0].in_flight > 1 + CAUTIOUS_STALENESS
    assert 0 < slower.slowed < 1 and "with fewer in flight while the learning rate is high" in slower.reason
    assert slower.predicted_samples_per_second < plain.predicted_samples_per_second
    assert f"{slower.predicted_samples_per_second:.1f} samples/s" in slower.reason


def test_figures_that_cannot_be_are_not_believed() -> None:
    absurd = member(flops_per_second=1e-300, memory_bytes_per_second=1e300, link=LinkSpeed(1e9, 1e-300, 1e300))
    provider = provider_of(absurd, COSTS, REACHED, HERE)
    assert (provider.compute_speed, provider.memory_speed) == (1e-5, 1e5)
    assert (provider.up_bytes_per_second, provider.down_bytes_per_second) == (1e3, 1e12)
    assert provider.latency_seconds == 10.0
    both = {"anna": provider, "ben": replace(provider, name="ben")}
    lines = measured_lines(("anna", "ben"), LinkSpeed(1e9, 1e-300, 1e300), both, Network())
    assert set(lines.values()) == {Line(1e3, 10.0), Line(1e12, 10.0)}


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "127.0.0.5:7000", "[::1]:7000"])
def test_providers_on_the_coordinators_machine_share_it(address: str) -> None:
    one = provider_of(member(address=address, link=LinkSpeed(0.04, 5e6, 20e6)), COSTS, REACHED, HERE)
    other = provider_of(member("ben", address=address), COSTS, REACHED, HERE)
    assert one.machine == other.machine == HERE.host and one.cores == 4
    assert Network().line(one, other) == Line()
    # Two friends behind one router come from one address, and are not one machine.
    friends = [provider_of(member(name, address="", seen_host="203.0.113.7"), COSTS, REACHED, HERE) for name in "ab"]
    assert friends[0].machine != friends[1].machine


def test_the_requesters_line_is_at_least_the_fastest_measured_to_it() -> None:
    members = [member(link=LinkSpeed(0.04, 5e6, 20e6)), member(link=LinkSpeed(0.01, 9e6, 10e6)), member()]
    found = requester_of(members, HERE)
    assert (found.up_bytes_per_second, found.down_bytes_per_second) == (20e6, 9e6)
    assert requester_of([member()], HERE).up_bytes_per_second == float("inf")


def test_a_stated_line_of_the_requester_counts_instead_of_the_measured_one() -> None:
    members = [member(link=LinkSpeed(0.04, 5e6, 20e6))]
    found = requester_of(members, Machine(4, 2, StatedLine(up_bytes_per_second=2.5e6)))
    assert (found.up_bytes_per_second, found.down_bytes_per_second) == (2.5e6, 5e6)


def test_the_job_says_what_is_fixed() -> None:
    settings = Pipeline(in_flight=3, max_staleness=4, accumulate=2)
    job = Job(
        model=nn.Linear(2, 2),
        loss=F.cross_entropy,
        train_data=[(torch.ones(2, 2), torch.ones(2, dtype=torch.long))],
        optimizer=torch.optim.SGD,
        pipeline=settings,
    )
    goal = goal_of(job, None, None)
    assert (goal.in_flight, goal.max_staleness, goal.accumulate) == (3, 4, 2)
    assert (goal.min_clusters, goal.max_clusters, goal.min_stages, goal.min_providers) == (1, None, 1, 0)


def two_stages(one: Provider, other: Provider) -> Plan:
    return a_plan([cluster_plan([stage_plan(one.name), stage_plan(other.name, 1)])])


def test_lines_between_neighbours_are_measured_by_whoever_can_dial() -> None:
    open_one = Provider(name="a", memory_bytes=1 << 40)
    closed = replace(open_one, name="b", reachable=False)
    both = {"a": open_one, "b": closed}
    assert lines_to_measure(two_stages(open_one, closed), both, Network()) == [("b", "a")]
    assert lines_to_measure(two_stages(closed, open_one), both, Network()) == [("b", "a")]
    known = Network({("a", "b"): Line(1e6, 0.1)})
    assert lines_to_measure(two_stages(open_one, closed), both, known) == []
    relayed = {"a": replace(open_one, reachable=False), "b": closed}
    assert lines_to_measure(two_stages(relayed["a"], closed), relayed, Network()) == []


def test_lines_of_a_ring_are_measured_once_for_both_ways() -> None:
    three = {name: Provider(name=name, memory_bytes=1 << 40) for name in "abc"}
    for owners, pairs in (("ab", [("a", "b")]), ("abc", [("a", "b"), ("b", "c"), ("c", "a")])):
        ring = RingStages(0, tuple((number, 0) for number in range(len(owners))), RingTensors())
        alone = [cluster_plan([stage_plan(owner)], number) for number, owner in enumerate(owners)]
        planned = replace(a_plan(alone), ring_stages=(ring, ring))
        assert lines_to_measure(planned, three, Network()) == pairs
    known = Network({("a", "b"): Line(1e6, 0.1), ("c", "a"): Line(1e6, 0.1)})
    assert lines_to_measure(planned, three, known) == [("b", "c")]


def test_a_measured_line_holds_both_ways_and_a_failed_one_is_as_its_ends_say() -> None:
    one = Provider(name="a", memory_bytes=1, up_bytes_per_second=3e6, down_bytes_per_second=7e6, latency_seconds=0.01)
    both = {"a": one, "b": replace(one, name="b", up_bytes_per_second=1e6)}
    assert measured_lines(("a", "b"), LinkSpeed(0.05, 2e6, 4e6), both, Network()) == {
        ("a", "b"): Line(2e6, 0.025),
        ("b", "a"): Line(4e6, 0.025),
    }
    failed = measured_lines(("a", "b"), PeerError("nobody answers"), both, Network())
    assert failed == {("a", "b"): Line(3e6, 0.02), ("b", "a"): Line(1e6, 0.02)}


def test_a_plan_names_every_stage_what_limits_it_and_the_rate(prepared: PreparedJob) -> None:
    providers = [Provider(name=f"p{i}", memory_bytes=1 << 40, compute_speed=1.0 + i) for i in range(3)]
    planned = plan_members(prepared, providers, Network(), goal_of(prepared.job, 3, 1))
    assert {stage.node for stage in planned.stages} == {"p0", "p1", "p2"}
    assert [stage.role for stage in planned.stages] == ["root", "stem", "leaf"]
    (cluster,) = planned.clusters
    assert list(cluster.places) == [stage.start for stage in cluster.stages[1:]]
    assert (planned.rings, planned.average_every, planned.round_seconds) == ((), 0, 0.0)
    assert "3 stages" in planned.reason and "samples/s, limited by" in planned.reason
    assert planned.predicted_samples_per_second > 0
    assert sum(stage.parameters for stage in planned.stages) == 4 * (64 * 64 + 64)


def test_several_clusters_have_rings_of_their_parameters(prepared: PreparedJob) -> None:
    providers = [Provider(name=f"p{i}", memory_bytes=1 << 40) for i in range(5)]
    planned = plan_members(prepared, providers, Network(), goal_of(prepared.job, 5, 2))
    assert sorted(len(cluster.stages) for cluster in planned.clusters) == [2, 3]
    assert [cluster.id for cluster in planned.clusters] == [0, 1]
    assert len({stage.node for stage in planned.stages}) == 5
    assert [(s.cluster, s.stage) for s in planned.stages if s.cluster] == [
        (1, k) for k in range(len(planned.clusters[1].stages))
    ]
    assert planned.cluster_of == {stage.node: stage.cluster for stage in planned.stages}
    keys = [spec.key for ring in planned.rings for spec in ring.tensors.parameters]
    assert sorted(keys) == sorted(prepared.job.model.state_dict())
    for ring in planned.rings:
        assert [planned.cluster_of[owner] for owner in sorted(ring.owners, key=planned.cluster_of.get)] == [0, 1]  # type: ignore[arg-type]
        for stage in planned.stages:
            held = {spec.key for spec in stage.graph.parameters}
            inside = {spec.key for spec in ring.tensors.parameters}
            assert inside <= held if stage.node in ring.owners else not inside & held
    assert [ring.ring for ring in planned.rings] == list(range(len(planned.rings)))
    assert (
        {ring.fragment for ring in planned.rings} == {0}
        and planned.average_every > 0
        and planned.average_reason in planned.reason
    )
    assert "2 clusters of" in planned.reason


def test_fragments_are_averaged_in_turn_and_rounds_are_as_much_shorter(prepared: PreparedJob) -> None:
    slow = [Provider(name=f"p{i}", memory_bytes=1 << 40, up_bytes_per_second=1e4) for i in range(2)]

    def planned(averaging: Averaging) -> Plan:
        job = replace(prepared.job, averaging=averaging)
        return plan_members(replace(prepared, job=job), slow, Network(), goal_of(job, 2, 2))

    whole, parts = planned(Averaging(codec="float32")), planned(Averaging(codec="float32", fragments=4))
    assert [len({ring.fragment for ring in plan.rings}) for plan in (whole, parts)] == [1, 4]
    assert parts.round_seconds == pytest.approx(whole.round_seconds / 4, rel=0.1)
    coded = planned(Averaging(codec="int8"))
    assert coded.round_seconds == pytest.approx(whole.round_seconds / 4, rel=0.05)
    assert {ring.codec for ring in coded.rings} == {"int8"} and {ring.codec for ring in whole.rings} == {"float32"}


def test_the_codec_of_rings_follows_their_lines_and_is_told(prepared: PreparedJob) -> None:
    def planned(rate: float, host: str = "") -> Plan:
        providers = [
            Provider(name=f"p{i}", memory_bytes=1 << 40, up_bytes_per_second=rate, host=host, cores=4) for i in range(2)
        ]
        return plan_members(prepared, providers, Network(), goal_of(prepared.job, 2, 2))

    fast, slow, at_home = planned(1e12), planned(1e4), planned(1e4, "desk")
    assert [{ring.codec for ring in plan.rings} for plan in (fast, slow, at_home)] == [
        {"float32"},
        {"int4"},
        {"float32"},
    ]
    assert "in float32: each owner sends" in fast.reason and "of its slowest line" in fast.reason
    assert "in int4: each owner sends" in slow.reason and slow.reason.endswith("carry in reasonable time")
    assert "no line between its owners has a limit" in at_home.reason
    # A slow line carries small pieces.
    assert all(0 < ring.piece_values <= 2 * (64 << 10) for ring in slow.rings)
    assert all(ring.piece_values == 0 for ring in at_home.rings)


def test_rounds_come_as_often_as_the_job_says_or_lines_and_updates_allow() -> None:
    forever, at_once, long = RoundTime(1e9), RoundTime(), RoundTime(joining_seconds=20.0, line_seconds=80.0)
    every = average_every(Averaging(every=1234), [10.0, 10.0], 8, 1, forever, 1)
    assert every.samples == 1234 and "averaging.every" in every.reason and "begins late" in every.reason
    # The slower cluster makes its updates while the other makes three times as many.
    every = average_every(Averaging(), [30.0, 10.0], 8, 2, at_once, 1)
    assert every.samples == MIN_UPDATES * 2 * 8 * 4 and f"{MIN_UPDATES} updates" in every.reason
    every = average_every(Averaging(), [30.0, 10.0], 8, 1, long, 1)
    assert every.samples == (20 + ROUND_SHARE * 80) * 40 and "takes 1:40" in every.reason
    assert every.seconds == 180.0 and every.reason.startswith("a round every 7,200 samples, 3:00, so that one is over")
    every = average_every(Averaging(blocking=True), [30.0, 10.0], 8, 1, long, 1)
    assert every.samples == (20 + BLOCKING_SHARE * 80) * 40
    every = average_every(Averaging(), [10.0, 10.0], 8, 1, at_once, 4)
    assert every.samples == MIN_UPDATES * 8 * 2 / 4 and "the same of 4 fragments" in every.reason


def test_rounds_keep_to_the_budget_of_lines_and_machines() -> None:
    lines = RoundTime(line_seconds=1.0, budget_seconds=500.0)
    every = average_every(Averaging(), [30.0, 10.0], 8, 1, lines, 1)
    assert every.samples == 500 * 40 and "at most 15% of a line" in every.reason
    busy = RoundTime(coding_seconds=30.0)
    every = average_every(Averaging(), [30.0, 10.0], 8, 1, busy, 1)
    assert every.samples == math.ceil(30.0 / MAX_SLOWDOWN * 40) and "slow training by at most 3%" in every.reason
    # A measured time takes the place of the predicted one.
    every = average_every(Averaging(), [30.0, 10.0], 8, 1, lines, 1, measured=(100.0, 900.0))
    assert every.samples == (100 + ROUND_SHARE * 900) * 40


def test_averaging_takes_memory_of_every_provider_of_several_clusters(prepared: PreparedJob) -> None:
    def held(goal: Goal) -> float:
        return float(memory_bytes(model_costs(prepared), goal, 1)[0, -1])

    alone = held(goal_of(prepared.job, None, 1))
    parameters = float(model_costs(prepared).parameter_bytes[-1])
    for settings, numbers in (
        (Averaging(codec="float32"), 3),
        (Averaging(codec="float32", outer="nesterov"), 4),
        (Averaging(codec="int4"), 5),
        (Averaging(codec="int8"), 5),
        (Averaging(), 5),
        (Averaging(codec="float32", optimizer_state=True), 7),
    ):
        goal = goal_of(replace(prepared.job, averaging=settings), None, 2)
        assert held(goal) == pytest.approx(alone + 1.3 * numbers * parameters)
    half = goal_of(replace(prepared.job, model=nn.Linear(4, 4).half()), None, 2)
    assert half.average_memory == 10.0


def test_a_model_that_cannot_be_averaged_is_planned_for_one_cluster_unless_several_are_asked_for() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(70_000, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1  # type: ignore[operator]
            return self.other(self.one(x).relu())  # type: ignore[no-any-return]

    batches = [(torch.randn(n, 4), torch.randn(n, 4)) for n in (8, 7)]
    job = Job(model=Counting(), loss=F.mse_loss, train_data=batches, optimizer=torch.optim.SGD)
    prepared = prepare(job, 1, None, lambda phase: None)
    providers = [Provider(name=f"p{i}", memory_bytes=1 << 40) for i in range(2)]
    assert len(plan_members(prepared, providers, Network(), goal_of(job, None, None)).clusters) == 1
    with pytest.raises(PlanError, match=r"The buffer seen has 70,000 whole numbers"):
        plan_members(prepared, providers, Network(), goal_of(job, 2, 2))


def test_fewer_providers_than_clusters_are_refused_with_both_ways_out(prepared: PreparedJob) -> None:
    with pytest.raises(PlanError, match=r"3 clusters cannot be made of 2 providers.*--providers 3.*--clusters 2"):
        goal_of(prepared.job, 2, 3)
    assert goal_of(prepared.job, 2, None).min_providers == 0


def test_more_stages_than_the_model_has_are_refused_with_the_number_it_has(prepared: PreparedJob) -> None:
    with pytest.raises(PlanError, match=r"at most 4 stages, not 5 .* use --providers 4 or fewer"):
        check_stages(model_costs(prepared), 5)


def test_a_job_says_where_it_may_be_cut(prepared: PreparedJob) -> None:
    job = replace(prepared.job, pipeline=Pipeline(cuts="2,6"))  # type: ignore[arg-type]  # as --set gives it
    providers = [Provider(name=f"p{i}", memory_bytes=1 << 40) for i in range(3)]
    planned = plan_members(replace(prepared, job=job), providers, Network(), goal_of(job, 3, 1))
    assert [stage.graph.parameters[0].key for stage in planned.stages] == ["0.weight", "2.weight", "6.weight"]
    with pytest.raises(PlanError, match=r"at most 3 stages, not 4"):
        check_stages(model_costs(replace(prepared, job=job)), 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [("22", "trains no parameter of that name"), ("2.wieght", "2.weight?"), ("0", "cannot be cut before")],
)
def test_a_place_where_no_stage_can_begin_is_named(prepared: PreparedJob, name: str, says: str) -> None:
    job = replace(prepared.job, pipeline=Pipeline(cuts=(name,)))
    with pytest.raises(PlanError, match=says):
        model_costs(replace(prepared, job=job))


def test_a_machine_that_pretends_a_time_is_planned_with_it(prepared: PreparedJob) -> None:
    told = provider_of(member(stage_seconds=0.2), COSTS, REACHED, HERE)
    assert told.min_stage_seconds == 0.2
    pair = [replace(told, name=name, memory_bytes=1 << 40) for name in ("p0", "p1")]
    planned = plan_members(prepared, pair, Network(), goal_of(prepared.job, 2, 1))
    assert 0.2 <= planned.clusters[0].cost.busiest_seconds < 0.25


def test_a_model_that_does_not_fit_says_so(prepared: PreparedJob) -> None:
    goal = goal_of(prepared.job, None, None)
    large, small = (provider_of(member(memory_bytes=size), COSTS, NOT_REACHED, HERE) for size in (8 << 30, 1000))
    assert plan_members(prepared, [large], Network(), goal).clusters
    with pytest.raises(PlanError):
        plan_members(prepared, [small], Network(), goal)


def test_a_plan_holds_until_providers_lines_or_the_goal_change(prepared: PreparedJob) -> None:
    providers = [Provider(name=f"p{i}", memory_bytes=1 << 40) for i in range(2)]
    by_name, goal = {p.name: p for p in providers}, goal_of(prepared.job, 2, 1)
    basis = plan_members(prepared, providers, Network(), goal).basis
    assert basis.holds_for(goal, Network(), by_name)
    assert not basis.holds_for(goal_of(prepared.job, 1, 1), Network(), by_name)
    assert not basis.holds_for(goal, Network({("p0", "p1"): Line(1e6, 0.1)}), by_name)
    assert not basis.holds_for(goal, Network(), {"p0": providers[0]})


def test_more_is_fed_ahead_the_farther_the_coordinator_is(prepared: PreparedJob) -> None:
    near = [Provider(name=f"p{i}", memory_bytes=1 << 40) for i in range(2)]
    far = [replace(p, latency_seconds=0.1) for p in near]
    ahead = []
    for providers in (near, far):
        planned = plan_members(prepared, providers, Network(), goal_of(prepared.job, 2, 1))
        ahead.append(feed_ahead(planned.clusters[0].cost, {p.name: p for p in providers}))
        assert planned.clusters[0].ahead == ahead[-1]
    assert ahead[0] < ahead[1] <= 34


@pytest.mark.parametrize(
    ("seen", "kept_back"), [({}, 0), ({"ben": Attendance(stays=4, connected_seconds=600.0, losses=3)}, 1)]
)
def test_a_run_and_a_dry_run_keep_the_same_standbys_for_the_same_reliabilities(
    prepared: PreparedJob, seen: dict[str, Attendance], kept_back: int
) -> None:
    swarm_members = Members()
    swarm_members.restore_presence(seen)
    present = [member(name, address=f"10.0.0.{number}:7000") for number, name in enumerate(("anna", "ben", "carla"))]
    for each in present:
        swarm_members.put(each)

    async def reaches(members: Sequence[Member]) -> dict[str, Reach]:
        return {each.node_id: REACHED for each in members}

    swarm = cast(Swarm, SimpleNamespace(members=swarm_members, reaches=reaches))
    goal = goal_of(prepared.job, None, None)
    planner = RunPlanner(swarm, HERE, ObservedLimits(), on_measuring=lambda phase: None)
    run = asyncio.run(planner.plan(prepared, present, goal))
    text = "".join(
        f'[[node]]\nname = "{each.node_id}"\nmemory = "8GiB"\n'
        f"reliability = {swarm_members.reliability(each.node_id).value}\n"
        for each in present
    )
    nodes = read_nodes(text)
    dry_run = plan_members(prepared, nodes.providers(0.0, 0.0), nodes.network, goal)
    assert run.standbys == dry_run.standbys
    assert len(run.standbys) == kept_back
    assert run.reason == dry_run.reason and ("kept back" in run.reason) is bool(kept_back)


def test_a_plan_says_why_its_cuts_were_preferred_and_whether_fewer_stages_would_be_faster(
    prepared: PreparedJob,
) -> None:
    # What crosses a cut of this small model takes longer than the model.
    providers = [Provider(name=name, memory_bytes=8 << 30, host="here", cores=1) for name in ("anna", "ben", "cleo")]
    planned = plan_members(prepared, providers, Network(), goal_of(prepared.job, 3, 1))
    assert len(planned.stages) == 3
    assert "; 3 stages were asked for; without " in planned.reason
    free = plan_members(prepared, providers, Network(), goal_of(prepared.job, None, 1))
    assert len(free.stages) == 1 and "were asked for" not in free.reason
