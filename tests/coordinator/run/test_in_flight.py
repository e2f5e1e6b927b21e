"""The reports of stages decide the limit on microbatches in flight; the root is told, and an event has the reason."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.in_flight import InFlightLimits, counts_of
from ravnest.net.v1.control_pb2 import CoordinatorMessage, LinkState, Report, Strained
from ravnest.planner.plan import ClusterPlan
from tests.builders import stage_plan

STAGES, STAGE_SECONDS, DELAY_SECONDS = 3, 0.1, 0.3


class FakeContext:
    """Records events and messages."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.told: list[tuple[str, CoordinatorMessage]] = []
        self.notified = 0

    def emit(self, kind: str, reason: str, **values: Any) -> None:
        self.events.append((kind, reason, values))

    async def tell(self, node_id: str, message: CoordinatorMessage) -> None:
        self.told.append((node_id, message))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def notify(self) -> None:
        self.notified += 1


def a_cluster(
    stages: int = STAGES,
    in_flight: int = 4,
    max_in_flight: int = 20,
    line_seconds: float = 0.0,
    feed_seconds: float = 0.0,
) -> ClusterRun:
    nodes = tuple(stage_plan(f"p{s}", s, line_seconds=line_seconds) for s in range(stages))
    plan = ClusterPlan(
        0, nodes, in_flight, 2, 1.0, "as planned", max_in_flight=max_in_flight, feed_seconds=feed_seconds
    )
    return Clusters([plan]).all[0]


def limits_of(cluster: ClusterRun, fixed: bool = False) -> tuple[InFlightLimits, FakeContext]:
    context: Any = FakeContext()
    return InFlightLimits(context, "d1", [cluster], fixed), context


def run(
    limits: InFlightLimits, cluster: ClusterRun, seconds: int, begin: int = 0, max_rate: float = 10.0, **more: Any
) -> None:
    """Reports of a cluster whose round trip takes 0.9 s. Its rate is the number in flight divided by that, up to
    `max_rate`, which is the rate of its slowest stage or line."""
    done, flown = 10.0 * begin, 4.0 * begin
    for second in range(begin, begin + seconds):
        rate = min(max_rate, cluster.in_flight / (STAGES * STAGE_SECONDS + 2 * DELAY_SECONDS))
        done, flown = done + rate, flown + cluster.in_flight - 0.3
        for stage in range(len(cluster.plan.stages)):
            report = Report(
                deployment="d1",
                seconds=second + 0.1 * stage,
                forwards=int(done),
                forward_seconds=0.04 * int(done),
                backwards=int(done),
                backward_seconds=0.05 * int(done),
                update_seconds=0.01 * int(done),
                flight_seconds=flown,
                links=[LinkState(next=True, delay_seconds=DELAY_SECONDS)] if stage < STAGES - 1 else [],
            )
            report.MergeFrom(Report(**more))
            limits.reported(cluster, stage, report)


def test_the_root_is_told_and_the_change_is_an_event_with_its_reason() -> None:
    cluster = a_cluster()
    limits, context = limits_of(cluster)
    run(limits, cluster, 60)
    assert cluster.in_flight == 11, cluster.flight_reason
    (kind, reason, values), *_ = context.events
    assert (kind, values["cluster"], values["old"]) == ("in_flight", 0, 4)
    assert reason.startswith(f"{values['new']} in flight instead of 4: the slowest stage is busy")
    assert [node for node, _ in context.told] == ["p0"] * len(context.events)
    orders = [message.flight for _, message in context.told]
    assert [order.in_flight for order in orders] == [values["new"] for _, _, values in context.events]
    assert {order.deployment for order in orders} == {"d1"}
    assert cluster.flight_reason.startswith("the slowest stage is busy")


def test_room_grows_and_shrinks_with_the_limit() -> None:
    cluster = a_cluster()
    assert (cluster.in_flight, cluster.room, cluster.flight_reason) == (4, 6, "as planned")
    cluster.in_flight = 9
    assert cluster.room == 11
    cluster.open = {number: TrainBatch(number, {}, 8, DataPosition()) for number in range(11)}
    cluster.in_flight = 2
    assert cluster.room < 0, "the microbatches in flight come back first"
    assert cluster.evaluation_room == 2 * 4 + 2, "stages were told the planned number when they were deployed"


def test_a_number_that_the_job_sets_stays() -> None:
    cluster = a_cluster()
    limits, context = limits_of(cluster, fixed=True)
    run(limits, cluster, 60)
    assert (cluster.in_flight, context.events, context.told) == (4, [], [])


def test_a_cluster_of_one_stage_has_a_fixed_limit() -> None:
    cluster = a_cluster(stages=1, in_flight=1)
    limits, context = limits_of(cluster)
    run(limits, cluster, 60)
    assert (cluster.in_flight, context.events) == (1, [])


def test_the_limit_never_exceeds_the_planned_maximum() -> None:
    cluster = a_cluster(max_in_flight=6)
    limits, _ = limits_of(cluster)
    run(limits, cluster, 60)
    assert cluster.in_flight == 6 and "no more than 6" in cluster.flight_reason


def test_a_higher_limit_is_not_tried_if_the_plan_says_that_a_line_is_the_bottleneck() -> None:
    known, unknown = a_cluster(line_seconds=0.25), a_cluster()
    for cluster in (known, unknown):
        limits, _ = limits_of(cluster)
        run(limits, cluster, 20, max_rate=4.0)
    assert known.in_flight == 4 and "did not make it faster" in known.flight_reason
    assert unknown.in_flight > 4


def test_a_pause_of_training_changes_no_limit() -> None:
    cluster = a_cluster(in_flight=10)
    limits, context = limits_of(cluster)
    run(limits, cluster, 8)
    before = len(context.events)
    # An evaluation of ten minutes pauses training.
    limits.restart()
    run(limits, cluster, 2, begin=600)
    assert len(context.events) == before


def test_a_cluster_far_from_the_coordinator_is_fed_further_ahead_as_it_becomes_faster() -> None:
    cluster = a_cluster(feed_seconds=1.0)
    limits, context = limits_of(cluster)
    run(limits, cluster, 60)
    assert cluster.ahead == 2 + 10
    assert context.notified


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", ["seconds", "forward_seconds", "backward_seconds", "flight_seconds"])
def test_impossible_figures_are_not_counted(field: str, figure: float) -> None:
    assert counts_of(Report(**{field: figure})) is None
    assert counts_of(Report(links=[LinkState(next=True, delay_seconds=figure)])) is None


def test_false_reports_move_the_limit_only_within_its_bounds() -> None:
    cluster = a_cluster(max_in_flight=6)
    limits, _ = limits_of(cluster)
    for second in range(200):
        for stage in range(STAGES):
            odd = {"forward_seconds": float(second % 7 * 1e9), "backward_seconds": 0.0, "flight_seconds": 1e11}
            counted = second * 50 if second % 9 else 0
            limits.reported(cluster, stage, Report(seconds=float(second), forwards=counted, backwards=counted, **odd))
    assert 1 <= cluster.in_flight <= 6


class FakeMetrics:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, *, samples: int, updates: int, values: dict[str, float], **labels: Any) -> None:
        self.lines.append({"kind": kind, "updates": updates, **values, **labels})


def test_the_curves_of_each_stage_have_the_staleness_of_its_updates() -> None:
    metrics: Any = FakeMetrics()
    recorder = Recorder(Progress("job", 1, Ledger(DataPosition())), metrics)
    recorder.take("p0", 0, 1, Report(updates=2, staleness_sum=1, staleness_max=1, staleness_counts=[1, 1]))
    recorder.take("p0", 0, 1, Report(updates=2, staleness_sum=1, staleness_max=1, staleness_counts=[1, 1]))
    recorder.take("p0", 0, 1, Report(updates=4, staleness_sum=5, staleness_max=3, staleness_counts=[1, 2, 0, 1]))
    assert metrics.lines == [
        {"kind": "stage", "updates": 2, "staleness": 0.5, "staleness_max": 1, "cluster": 0, "stage": 1},
        {"kind": "stage", "updates": 4, "staleness": 2.0, "staleness_max": 3, "cluster": 0, "stage": 1},
    ]


def test_a_stage_with_short_memory_sets_a_bound_that_no_measurement_raises() -> None:
    cluster = a_cluster(in_flight=8)
    limits, context = limits_of(cluster)
    limits.strained(cluster, "p1", Strained(deployment="d1", in_flight=3, free_bytes=7, reason="200 MiB are left"))
    assert cluster.in_flight == 3
    strained, in_flight = context.events
    assert strained[0] == "strained" and strained[1] == "p1: 200 MiB are left"
    assert strained[2] == {"provider": "p1", "cluster": 0, "in_flight": 3, "recomputes": False, "free_bytes": 7}
    assert in_flight[:2] == ("in_flight", "3 in flight instead of 8: 200 MiB are left")
    assert [message.flight.in_flight for _, message in context.told] == [3]
    run(limits, cluster, 60)
    assert cluster.in_flight == 3, "a higher limit would be faster, but does not fit in memory"


def test_the_lowest_bound_holds_until_its_stage_has_enough_memory_again() -> None:
    cluster = a_cluster(in_flight=8)
    limits, _ = limits_of(cluster)
    limits.strained(cluster, "p1", Strained(in_flight=3))
    limits.strained(cluster, "p2", Strained(in_flight=5))
    assert cluster.in_flight == 3
    limits.strained(cluster, "p1", Strained(in_flight=0))
    run(limits, cluster, 60)
    assert cluster.in_flight == 5


def test_short_memory_lowers_even_the_number_that_the_job_sets() -> None:
    cluster = a_cluster(in_flight=4)
    limits, context = limits_of(cluster, fixed=True)
    limits.strained(cluster, "p1", Strained(in_flight=2))
    assert cluster.in_flight == 2
    limits.strained(cluster, "p1", Strained(in_flight=0))
    assert cluster.in_flight == 4 and [m.flight.in_flight for _, m in context.told] == [2, 4]


def test_short_memory_does_not_change_the_limit_of_a_cluster_of_one_stage() -> None:
    cluster = a_cluster(stages=1, in_flight=1)
    limits, context = limits_of(cluster)
    limits.strained(cluster, "p0", Strained(in_flight=0, recomputes=True, reason="short"))
    assert cluster.in_flight == 1 and [kind for kind, _, _ in context.events] == ["strained"] and not context.told


def allowing(cluster: ClusterRun, allowed: list[int]) -> tuple[InFlightLimits, FakeContext]:
    context: Any = FakeContext()
    return InFlightLimits(context, "d1", [cluster], False, lambda stages: allowed[0]), context


def test_a_high_learning_rate_lowers_the_first_limit_and_the_root_is_told_at_the_start() -> None:
    cluster = a_cluster(in_flight=8)
    limits, context = allowing(cluster, [3])
    assert cluster.in_flight == 3 and not context.events
    limits.began()
    [(kind, reason, values)] = context.events
    assert (kind, values["old"], values["new"]) == ("in_flight", 8, 3)
    assert reason == "3 in flight instead of 8: no more than 3 may be in flight at the current learning rate"
    assert [message.flight.in_flight for _, message in context.told] == [3]


def test_a_learning_rate_that_allows_the_planned_number_changes_nothing() -> None:
    cluster = a_cluster(in_flight=8)
    limits, context = allowing(cluster, [8])
    limits.began()
    assert (cluster.in_flight, context.events, context.told) == (8, [], [])


def test_the_limit_rises_as_the_learning_rate_falls() -> None:
    cluster, allowed = a_cluster(in_flight=8), [3]
    limits, context = allowing(cluster, allowed)
    run(limits, cluster, 30)
    assert cluster.in_flight == 3 and "no more than 3 may be in flight at the current learning rate" in (
        cluster.flight_reason
    )
    allowed[0] = 6
    run(limits, cluster, 1, begin=30)
    assert cluster.in_flight == 6
    allowed[0] = 30
    run(limits, cluster, 1, begin=31)
    assert cluster.in_flight == 8
    run(limits, cluster, 60, begin=32)
    assert cluster.in_flight == 11, "the same limit as without a learning rate"
    numbers = [values["new"] for kind, _, values in context.events if kind == "in_flight"]
    assert numbers[:2] == [6, 8]


def test_a_redeployed_cluster_keeps_the_bound_of_the_learning_rate_and_the_planned_number() -> None:
    cluster, allowed = a_cluster(in_flight=8), [3]
    limits, context = allowing(cluster, allowed)
    limits.formed(cluster)
    assert cluster.in_flight == 3 and not context.told
    allowed[0] = 5
    limits.formed(cluster)
    assert cluster.in_flight == 5
    allowed[0] = 20
    limits.formed(cluster)
    assert cluster.in_flight == 8
    assert [message.flight.in_flight for _, message in context.told] == [5, 8], "the root has the current limit"


def test_the_learning_rate_does_not_lower_a_number_that_the_job_sets() -> None:
    cluster = a_cluster(in_flight=8)
    context: Any = FakeContext()
    InFlightLimits(context, "d1", [cluster], True, lambda stages: 3).began()
    assert (cluster.in_flight, context.events) == (8, [])
