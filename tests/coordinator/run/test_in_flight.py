"""What stages report decides how many microbatches their cluster has in flight, and everybody concerned hears of it."""

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


class FakeCourse:
    """Keeps what is said and written."""

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
    stages: int = STAGES, in_flight: int = 4, most: int = 20, line_seconds: float = 0.0, feed_seconds: float = 0.0
) -> ClusterRun:
    nodes = tuple(stage_plan(f"p{s}", s, line_seconds=line_seconds) for s in range(stages))
    plan = ClusterPlan(0, nodes, in_flight, 2, 1.0, "as planned", max_in_flight=most, feed_seconds=feed_seconds)
    return Clusters([plan]).all[0]


def flights_of(cluster: ClusterRun, fixed: bool = False) -> tuple[InFlightLimits, FakeCourse]:
    course: Any = FakeCourse()
    return InFlightLimits(course, "d1", [cluster], fixed), course


def run(
    flights: InFlightLimits, cluster: ClusterRun, seconds: int, begin: int = 0, most: float = 10.0, **more: Any
) -> None:
    """A cluster whose way is 0.9 s long: its rate is what is in flight over that, up to that of its stages or lines."""
    done, flown = 10.0 * begin, 4.0 * begin
    for second in range(begin, begin + seconds):
        rate = min(most, cluster.in_flight / (STAGES * STAGE_SECONDS + 2 * DELAY_SECONDS))
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
            flights.reported(cluster, stage, report)


def test_the_root_is_told_and_the_change_is_an_event_with_its_reason() -> None:
    cluster = a_cluster()
    flights, course = flights_of(cluster)
    run(flights, cluster, 60)
    assert cluster.in_flight == 11, cluster.flight_reason
    (kind, reason, values), *_ = course.events
    assert (kind, values["cluster"], values["old"]) == ("in_flight", 0, 4)
    assert reason.startswith(f"{values['new']} in flight instead of 4: the slowest stage works")
    assert [node for node, _ in course.told] == ["p0"] * len(course.events)
    orders = [message.flight for _, message in course.told]
    assert [order.in_flight for order in orders] == [values["new"] for _, _, values in course.events]
    assert {order.deployment for order in orders} == {"d1"}
    assert cluster.flight_reason.startswith("the slowest stage works")


def test_room_grows_and_shrinks_with_the_number() -> None:
    cluster = a_cluster()
    assert (cluster.in_flight, cluster.room, cluster.flight_reason) == (4, 6, "as planned")
    cluster.in_flight = 9
    assert cluster.room == 11
    cluster.open = {number: TrainBatch(number, {}, 8, DataPosition()) for number in range(11)}
    cluster.in_flight = 2
    assert cluster.room < 0, "what is under way comes back first"
    assert cluster.evaluation_room == 2 * 4 + 2, "what stages take at a time was told when they were deployed"


def test_a_number_that_the_job_sets_stays() -> None:
    cluster = a_cluster()
    flights, course = flights_of(cluster, fixed=True)
    run(flights, cluster, 60)
    assert (cluster.in_flight, course.events, course.told) == (4, [], [])


def test_a_cluster_of_one_stage_has_nothing_to_decide() -> None:
    cluster = a_cluster(stages=1, in_flight=1)
    flights, course = flights_of(cluster)
    run(flights, cluster, 60)
    assert (cluster.in_flight, course.events) == (1, [])


def test_there_are_never_more_than_memory_and_the_bound_allow() -> None:
    cluster = a_cluster(most=6)
    flights, _ = flights_of(cluster)
    run(flights, cluster, 60)
    assert cluster.in_flight == 6 and "no more than 6" in cluster.flight_reason


def test_more_are_not_tried_at_once_where_the_plan_knows_that_a_line_is_the_limit() -> None:
    known, unknown = a_cluster(line_seconds=0.25), a_cluster()
    for cluster in (known, unknown):
        flights, _ = flights_of(cluster)
        run(flights, cluster, 20, most=4.0)
    assert known.in_flight == 4 and "did not make it faster" in known.flight_reason
    assert unknown.in_flight > 4


def test_nothing_is_concluded_from_a_time_in_which_training_stood_still() -> None:
    cluster = a_cluster(in_flight=10)
    flights, course = flights_of(cluster)
    run(flights, cluster, 8)
    before = len(course.events)
    # Ten minutes of an evaluation, in which nothing was trained on.
    flights.restart()
    run(flights, cluster, 2, begin=600)
    assert len(course.events) == before


def test_a_long_way_to_the_coordinator_is_fed_further_ahead_the_faster_it_goes() -> None:
    cluster = a_cluster(feed_seconds=1.0)
    flights, course = flights_of(cluster)
    run(flights, cluster, 60)
    assert cluster.ahead == 2 + 10
    assert course.notified


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", ["seconds", "forward_seconds", "backward_seconds", "flight_seconds"])
def test_figures_that_cannot_be_are_not_counted(field: str, figure: float) -> None:
    assert counts_of(Report(**{field: figure})) is None
    assert counts_of(Report(links=[LinkState(next=True, delay_seconds=figure)])) is None


def test_reports_that_lie_move_the_number_within_its_bounds_alone() -> None:
    cluster = a_cluster(most=6)
    flights, _ = flights_of(cluster)
    for second in range(200):
        for stage in range(STAGES):
            odd = {"forward_seconds": float(second % 7 * 1e9), "backward_seconds": 0.0, "flight_seconds": 1e11}
            counted = second * 50 if second % 9 else 0
            flights.reported(cluster, stage, Report(seconds=float(second), forwards=counted, backwards=counted, **odd))
    assert 1 <= cluster.in_flight <= 6


class FakeMetrics:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, *, samples: int, updates: int, values: dict[str, float], **labels: Any) -> None:
        self.lines.append({"kind": kind, "updates": updates, **values, **labels})


def test_how_stale_updates_were_is_on_the_curves_of_each_stage() -> None:
    metrics: Any = FakeMetrics()
    recorder = Recorder(Progress("job", 1, Ledger(DataPosition())), metrics)
    recorder.take("p0", 0, 1, Report(updates=2, staleness_sum=1, staleness_max=1, staleness_counts=[1, 1]))
    recorder.take("p0", 0, 1, Report(updates=2, staleness_sum=1, staleness_max=1, staleness_counts=[1, 1]))
    recorder.take("p0", 0, 1, Report(updates=4, staleness_sum=5, staleness_max=3, staleness_counts=[1, 2, 0, 1]))
    assert metrics.lines == [
        {"kind": "stage", "updates": 2, "staleness": 0.5, "staleness_max": 1, "cluster": 0, "stage": 1},
        {"kind": "stage", "updates": 4, "staleness": 2.0, "staleness_max": 3, "cluster": 0, "stage": 1},
    ]


def test_a_stage_whose_memory_is_short_sets_a_bound_that_holds_whatever_is_measured() -> None:
    cluster = a_cluster(in_flight=8)
    flights, course = flights_of(cluster)
    flights.strained(cluster, "p1", Strained(deployment="d1", in_flight=3, free_bytes=7, reason="200 MiB are left"))
    assert cluster.in_flight == 3
    strained, in_flight = course.events
    assert strained[0] == "strained" and strained[1] == "p1: 200 MiB are left"
    assert strained[2] == {"provider": "p1", "cluster": 0, "in_flight": 3, "recomputes": False, "free_bytes": 7}
    assert in_flight[:2] == ("in_flight", "3 in flight instead of 8: 200 MiB are left")
    assert [message.flight.in_flight for _, message in course.told] == [3]
    run(flights, cluster, 60)
    assert cluster.in_flight == 3, "more would be better, and do not fit"


def test_of_several_bounds_the_lowest_holds_and_one_that_is_taken_back_makes_room_again() -> None:
    cluster = a_cluster(in_flight=8)
    flights, _ = flights_of(cluster)
    flights.strained(cluster, "p1", Strained(in_flight=3))
    flights.strained(cluster, "p2", Strained(in_flight=5))
    assert cluster.in_flight == 3
    flights.strained(cluster, "p1", Strained(in_flight=0))
    run(flights, cluster, 60)
    assert cluster.in_flight == 5


def test_memory_comes_before_the_number_that_a_job_sets() -> None:
    cluster = a_cluster(in_flight=4)
    flights, course = flights_of(cluster, fixed=True)
    flights.strained(cluster, "p1", Strained(in_flight=2))
    assert cluster.in_flight == 2
    flights.strained(cluster, "p1", Strained(in_flight=0))
    assert cluster.in_flight == 4 and [m.flight.in_flight for _, m in course.told] == [2, 4]


def test_a_cluster_of_one_stage_has_nothing_to_take_away() -> None:
    cluster = a_cluster(stages=1, in_flight=1)
    flights, course = flights_of(cluster)
    flights.strained(cluster, "p0", Strained(in_flight=0, recomputes=True, reason="short"))
    assert cluster.in_flight == 1 and [kind for kind, _, _ in course.events] == ["strained"] and not course.told


def allowing(cluster: ClusterRun, allowed: list[int]) -> tuple[InFlightLimits, FakeCourse]:
    course: Any = FakeCourse()
    return InFlightLimits(course, "d1", [cluster], False, lambda stages: allowed[0]), course


def test_at_a_high_learning_rate_a_run_begins_with_fewer_and_its_root_is_told_when_it_has_begun() -> None:
    cluster = a_cluster(in_flight=8)
    flights, course = allowing(cluster, [3])
    assert cluster.in_flight == 3 and not course.events
    flights.began()
    [(kind, reason, values)] = course.events
    assert (kind, values["old"], values["new"]) == ("in_flight", 8, 3)
    assert reason == "3 in flight instead of 8: no more than 3 may be in flight at the learning rate of now"
    assert [message.flight.in_flight for _, message in course.told] == [3]


def test_a_run_that_is_not_held_begins_as_planned_and_nothing_is_said() -> None:
    cluster = a_cluster(in_flight=8)
    flights, course = allowing(cluster, [8])
    flights.began()
    assert (cluster.in_flight, course.events, course.told) == (8, [], [])


def test_as_the_rate_falls_there_are_as_many_again_as_were_planned_and_as_are_enough() -> None:
    cluster, allowed = a_cluster(in_flight=8), [3]
    flights, course = allowing(cluster, allowed)
    run(flights, cluster, 30)
    assert cluster.in_flight == 3 and "no more than 3 may be in flight at the learning rate of now" in (
        cluster.flight_reason
    )
    allowed[0] = 6
    run(flights, cluster, 1, begin=30)
    assert cluster.in_flight == 6
    allowed[0] = 30
    run(flights, cluster, 1, begin=31)
    assert cluster.in_flight == 8
    run(flights, cluster, 60, begin=32)
    assert cluster.in_flight == 11, "what is enough, as without a bound"
    numbers = [values["new"] for kind, _, values in course.events if kind == "in_flight"]
    assert numbers[:2] == [6, 8]


def test_a_cluster_that_is_formed_anew_is_held_as_before_and_knows_what_was_planned() -> None:
    cluster, allowed = a_cluster(in_flight=8), [3]
    flights, course = allowing(cluster, allowed)
    flights.formed(cluster)
    assert cluster.in_flight == 3 and not course.told
    allowed[0] = 5
    flights.formed(cluster)
    assert cluster.in_flight == 5
    allowed[0] = 20
    flights.formed(cluster)
    assert cluster.in_flight == 8
    assert [message.flight.in_flight for _, message in course.told] == [5, 8], "the root has what is counted with"


def test_a_number_that_the_job_sets_is_not_held() -> None:
    cluster = a_cluster(in_flight=8)
    course: Any = FakeCourse()
    InFlightLimits(course, "d1", [cluster], True, lambda stages: 3).began()
    assert (cluster.in_flight, course.events) == (8, [])
