"""How many microbatches are in flight: as few as keep the slowest stage or line busy, from wherever it begins."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.cluster import cluster_of, memory_bytes
from ravnest.planner.in_flight.control import FlightControl, StageCounts
from ravnest.planner.in_flight.decision import (
    AGAIN_SECONDS,
    PATIENCE_SECONDS,
    FailedTrial,
    FlightMemory,
    Trial,
    decide_flight,
    max_in_flight,
    when_planned,
)
from ravnest.planner.in_flight.measures import FlightMeasures
from ravnest.planner.pipeline_depth import enough_in_flight
from ravnest.planner.problem import Goal, Network
from tests.planner.in_flight.flying_pipeline import FlyingPipeline, Link, Uneven, fixed_rate, min_in_flight, settled
from tests.preview.planned import LAYERS, machines, model

MOST = 32
LINES = {
    "unshaped": (math.inf, 0.0),
    "500/10": (500.0, 0.01),
    "100/50": (100.0, 0.05),
    "20/100": (20.0, 0.1),
}


def measures(**changes: object) -> FlightMeasures:
    """Four stages of 0.1 s and links of 0.2 s: a way of 1 s, in which 10 begin where one begins every 0.1 s."""
    base = FlightMeasures(5, (0.1,) * 4, (0.2,) * 3, 0.2, 4.6, 60)
    return replace(base, **changes)  # type: ignore[arg-type]


def limit_rate(mbit: float) -> float:
    """Stages take 150 ms, and a mebibyte goes over each line, both ways."""
    return min(1 / 0.15, mbit * 125e3 / (1 << 20))


def way_seconds(stages: int, mbit: float, rtt: float) -> float:
    """What a microbatch takes that waits nowhere."""
    return 0.15 * stages + (stages - 1) * (2 * (1 << 20) / (mbit * 125e3) + rtt)


def flown(stages: int, mbit: float, rtt: float, start: int, seconds: float) -> tuple[FlyingPipeline, FlightControl]:
    pipeline = FlyingPipeline(stages, mbit=mbit, round_trip_seconds=rtt, limit=start)
    control = FlightControl(stages, start, MOST)
    pipeline.controlled_by(control)
    pipeline.run_until(seconds)
    return pipeline, control


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("line", LINES)
def test_from_any_start_it_comes_to_the_limit_with_hardly_more_than_it_takes(line: str, stages: int) -> None:
    mbit, rtt = LINES[line]
    best = limit_rate(mbit)
    least = min_in_flight(best, 0.97, stages=stages, mbit=mbit, round_trip_seconds=rtt)
    enough = max(least + 2, enough_in_flight(way_seconds(stages, mbit, rtt), [0.15] * stages, 1 / best))
    # Now and then it looks whether more bring something.
    most = enough + 1 + enough // 8
    # Where a microbatch takes long, it takes long to see what came of a change.
    seconds = 400.0 if line == "20/100" else 200.0
    for start in {1, max(1, least // 2), least, 2 * least, MOST}:
        pipeline, _ = flown(stages, mbit, rtt, min(start, MOST), seconds)
        assert pipeline.rate(0.7 * seconds, seconds) >= 0.97 * best, (start, pipeline.limits)
        assert len(pipeline.limits) <= 15, "it flaps"
        ended = settled(pipeline.limits, start, 0.7 * seconds)
        assert min(ended) <= enough and max(ended) <= most, (start, pipeline.limits)


def test_on_shared_cores_it_does_not_try_more_than_keep_them_busy() -> None:
    limits = {}
    for cores_in_use in (0.0, 2.0):
        pipeline = FlyingPipeline(4, limit=3, cores=2, uneven=Uneven(stage_share=0.04))
        control = FlightControl(4, 3, MOST, cores_in_use=cores_in_use)
        pipeline.controlled_by(control)
        pipeline.run_until(200.0)
        limits[cores_in_use] = max([3, *(limit for _, limit, _ in pipeline.limits)])
        assert pipeline.rate(100, 200) >= 0.95 * 2 / 0.6, pipeline.limits
    assert limits[2.0] == 3 < limits[0.0], "without that knowledge it tries what the slowest stage would need"


def change_latency(pipeline: FlyingPipeline, rtt: float) -> None:
    for link in (*pipeline.there, *pipeline.back):
        link.latency_seconds = rtt / 2


def change_rate(pipeline: FlyingPipeline, mbit: float) -> None:
    for link in (*pipeline.there, *pipeline.back):
        link.bytes_per_second = mbit * 125e3


def change_stage(pipeline: FlyingPipeline, slower: float) -> None:
    pipeline.stages[2].forward_seconds = 0.05 * slower
    pipeline.stages[2].backward_seconds = 0.1 * slower


@pytest.mark.parametrize(
    ("change", "to", "back", "shape"),
    [
        (change_latency, 0.1, 0.05, {"round_trip_seconds": 0.1, "mbit": 100.0}),
        (change_latency, 0.2, 0.05, {"round_trip_seconds": 0.2, "mbit": 100.0}),
        (change_rate, 20.0, 100.0, {"round_trip_seconds": 0.05, "mbit": 20.0}),
        (change_stage, 3.0, 1.0, {}),
    ],
)
def test_it_follows_lines_and_stages_that_change_and_change_back(
    change: object, to: float, back: float, shape: dict[str, float]
) -> None:
    pipeline, control = flown(4, 100.0, 0.05, 12, 60.0)
    change(pipeline, to)  # type: ignore[operator]
    pipeline.run_until(220.0)
    best = 1 / 0.45 if not shape else limit_rate(shape["mbit"])
    assert pipeline.rate(160, 220) >= 0.95 * best, pipeline.limits
    if shape:
        least = min_in_flight(best, 0.97, stages=4, **shape)
        assert control.limit <= least + 2, pipeline.limits
    else:
        assert control.limit <= 5, "a way of 1.55 s, and a stage that takes 0.45 s"
    change(pipeline, back)  # type: ignore[operator]
    pipeline.run_until(245.0)
    assert pipeline.rate(235, 245) >= 0.85 / 0.15, "within seconds it is nearly as fast as it can be"
    pipeline.run_until(340.0)
    assert pipeline.rate(290, 340) >= 0.97 / 0.15, pipeline.limits
    assert control.limit <= 12, pipeline.limits


def test_a_stage_that_takes_uneven_time_does_not_make_it_flap() -> None:
    pipeline, _ = flown(4, 100.0, 0.05, 10, 0.0)
    for number in range(600):
        # Every stage by turns takes half as long again, for a moment.
        pipeline.at(0.5 * number, lambda n=number: change_one(pipeline, n))
    pipeline.run_until(300.0)
    assert len([at for at, _, _ in pipeline.limits if at > 60]) <= 8, pipeline.limits
    assert pipeline.rate(100, 300) >= 0.93 * fixed_with_uneven_stages()


def change_one(pipeline: FlyingPipeline, number: int) -> None:
    for stage in pipeline.stages:
        slower = 1.5 if stage.number == number % 4 else 1.0
        stage.forward_seconds, stage.backward_seconds = 0.05 * slower, 0.1 * slower


def fixed_with_uneven_stages() -> float:
    pipeline = FlyingPipeline(4, mbit=100.0, round_trip_seconds=0.05, limit=16)
    for number in range(600):
        pipeline.at(0.5 * number, lambda n=number: change_one(pipeline, n))
    pipeline.run_until(300.0)
    return pipeline.rate(100, 300)


def test_a_cluster_that_is_fed_slowly_gets_no_more_in_flight() -> None:
    pipeline = FlyingPipeline(4, mbit=100.0, round_trip_seconds=0.05, limit=10, feed_seconds=0.5)
    control = FlightControl(4, 10, MOST)
    pipeline.controlled_by(control)
    pipeline.run_until(120.0)
    assert control.limit <= 10
    assert control.is_starved


def test_more_are_never_in_flight_than_memory_and_staleness_allow() -> None:
    pipeline = FlyingPipeline(4, mbit=100.0, round_trip_seconds=0.05, limit=4)
    control = FlightControl(4, 4, 6)
    pipeline.controlled_by(control)
    pipeline.run_until(60.0)
    assert control.limit == 6 and "no more than 6 may be in flight" in control.reason
    assert pipeline.rate(40, 60) == pytest.approx(
        fixed_rate(6, stages=4, mbit=100.0, round_trip_seconds=0.05), rel=0.02
    )


def test_a_stage_that_waits_gets_as_many_as_are_enough_for_the_way() -> None:
    decided = decide_flight(measures(), FlightMemory(), MOST)
    assert decided.limit == enough_in_flight(1.0, [0.1] * 4, 0.1) == 12
    assert decided.memory.trial == Trial(5, 0.2, (0.2, 0.2, 0.2))


def test_a_stage_that_waits_although_there_are_enough_gets_an_eighth_more() -> None:
    uneven = measures(limit=16, period_seconds=0.11, flying=15.5)
    decided = decide_flight(uneven, FlightMemory(), MOST)
    assert decided.limit == 19
    hasty = replace(uneven, microbatches=17, period_seconds=0.12)
    assert decide_flight(hasty, FlightMemory(), MOST).limit == 16, "it is looked at for longer first"


def test_many_that_only_queue_at_the_slowest_stage_are_taken_away_at_once_by_half() -> None:
    decided = decide_flight(measures(limit=20, period_seconds=0.1, flying=19.5), FlightMemory(), MOST)
    assert decided.limit == 16, "of eight to spare"
    assert "10.0 of 20 are queued" in decided.reason
    alone = decide_flight(measures(limit=12, period_seconds=0.1, flying=11.5), FlightMemory(), MOST)
    assert alone.limit == 12


def test_one_more_than_enough_is_taken_away_only_after_a_while() -> None:
    memory, taken = FlightMemory(), []
    for second in range(60):
        seen = measures(limit=13, period_seconds=0.1, flying=12.5, at_seconds=100.0 + second)
        decided = decide_flight(seen, memory, MOST)
        if decided.limit == 12:
            taken.append(second)
        else:
            memory = decided.memory
    assert taken[0] == PATIENCE_SECONDS
    # It has to be so all the while.
    memory = decide_flight(measures(limit=13, period_seconds=0.1, at_seconds=100.0), FlightMemory(), MOST).memory
    longer = measures(limit=13, period_seconds=0.1, at_seconds=110.0, delays=(0.25,) * 3)
    memory = decide_flight(longer, memory, MOST).memory
    assert decide_flight(replace(longer, at_seconds=125.0, delays=(0.2,) * 3), memory, MOST).limit == 13


def test_fewer_that_cost_something_are_taken_back_and_not_tried_again_for_minutes() -> None:
    fewer = decide_flight(measures(limit=20, period_seconds=0.1, flying=19.5), FlightMemory(), MOST)
    cost = decide_flight(measures(limit=fewer.limit, period_seconds=0.11, flying=16.5), fewer.memory, MOST)
    assert cost.limit == 20 and "16 in flight cost 9.1% of the rate" in cost.reason
    memory, tried = cost.memory, []
    for second in range(300):
        seen = measures(limit=20, period_seconds=0.1, flying=19.5, at_seconds=float(second))
        decided = decide_flight(seen, memory, MOST)
        if decided.limit < 20:
            tried.append(second)
            again = measures(limit=decided.limit, period_seconds=0.11, flying=16.5, at_seconds=float(second))
            decided = decide_flight(again, decided.memory, MOST)
            assert decided.limit == 20
        memory = decided.memory
    assert tried == [AGAIN_SECONDS, 3 * AGAIN_SECONDS], "each time after twice as long"


def test_those_that_only_queue_at_a_line_are_taken_away() -> None:
    memory = FlightMemory(delays=(0.2,) * 3, more_useless=FailedTrial(60.0, 0.2))
    queue = measures(limit=12, period_seconds=0.2, flying=11.5, delays=(0.2, 1.6, 0.2))
    decided = decide_flight(queue, memory, MOST)
    assert decided.limit == 9 and "7.0 of 12 are queued at a line" in decided.reason
    # If that made it slower, it was no queue: the way is that long.
    worse = decide_flight(replace(queue, limit=9, period_seconds=0.25, flying=8.6), decided.memory, MOST)
    assert worse.limit == 12 and "cost 20.0% of the rate" in worse.reason


def test_links_that_all_took_longer_at_once_have_no_queue() -> None:
    memory = FlightMemory(delays=(0.2,) * 3, more_useless=FailedTrial(60.0, 0.2))
    assert decide_flight(measures(limit=8, delays=(0.35,) * 3, flying=7.6), memory, MOST).limit == 8


def test_where_the_plan_says_that_a_line_is_the_limit_more_are_tried_only_later() -> None:
    memory = when_planned(0.2)
    assert decide_flight(measures(limit=6, flying=5.6), memory, MOST).limit == 6
    assert decide_flight(measures(limit=6, flying=5.6, at_seconds=AGAIN_SECONDS), memory, MOST).limit == 7
    quicker = measures(limit=6, flying=5.6, period_seconds=0.15)
    assert decide_flight(quicker, memory, MOST).limit == 12, "then the line is not what it was thought to be"


def test_more_that_brought_nothing_are_taken_back_and_not_tried_again_soon() -> None:
    grown = decide_flight(measures(), FlightMemory(), MOST)
    useless = measures(limit=13, flying=12.6, delays=(0.2, 1.8, 0.2))
    decided = decide_flight(useless, grown.memory, MOST)
    assert decided.limit == 5 and "13 in flight are not faster than 5" in decided.reason
    memory = decided.memory
    for second in range(60):
        again = decide_flight(measures(at_seconds=float(second)), memory, MOST)
        assert again.limit == 5
        memory = again.memory
    assert decide_flight(measures(at_seconds=60.0), memory, MOST).limit == 6, "carefully"


def test_nothing_is_concluded_of_fewer_while_something_has_become_faster() -> None:
    memory = FlightMemory(delays=(0.2,) * 3, trial=Trial(8, 0.4, (0.2, 1.2, 0.2)), more_useless=FailedTrial(60.0, 0.4))
    decided = decide_flight(measures(limit=7, period_seconds=0.15, flying=6.6), memory, MOST)
    assert decided.limit == 7 and decided.memory.trial is None
    assert decide_flight(measures(limit=7, period_seconds=0.15, flying=6.6), decided.memory, MOST).limit == 12


def test_a_limit_beyond_what_is_allowed_falls_at_once() -> None:
    assert decide_flight(measures(limit=9), FlightMemory(), 6).limit == 6


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_is_measured_the_decision_is_a_number_that_may_be(data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, 6))
    times = st.floats(0, 1e4)
    most = data.draw(st.integers(1, 40))
    memory = FlightMemory()
    for _ in range(data.draw(st.integers(1, 6))):
        seen = FlightMeasures(
            limit=data.draw(st.integers(1, 40)),
            seconds=tuple(data.draw(st.lists(times, min_size=stages, max_size=stages))),
            delays=tuple(data.draw(st.lists(times, min_size=stages - 1, max_size=stages - 1))),
            period_seconds=data.draw(st.floats(1e-6, 1e4)),
            flying=data.draw(st.floats(0, 50)),
            microbatches=data.draw(st.integers(1, 200)),
            at_seconds=data.draw(times),
        )
        decided = decide_flight(seen, memory, most)
        assert 1 <= decided.limit <= most and decided.reason
        assert decided == decide_flight(seen, memory, most)
        memory = decided.memory


def counts(at: float, done: int) -> StageCounts:
    return StageCounts(at, done, 0.1 * done, done, 0.1 * done, 4.0 * at, 0.05)


def test_nothing_is_concluded_before_the_limit_of_now_can_show() -> None:
    control = FlightControl(2, 4, MOST)
    for second in range(6):
        assert control.take(0, counts(second, second)) is None
        assert control.take(1, counts(second, second)) is None
    assert not control.reason
    control.restart()
    assert control.take(0, counts(6, 6)) is None


def test_a_stage_that_begins_to_count_anew_is_no_reason_to_fail() -> None:
    control = FlightControl(2, 2, MOST)
    for second in range(30):
        for stage in (0, 1):
            control.take(stage, counts(second, 5 * second))
    before = control.reason
    assert before
    for second in range(10):
        for stage in (0, 1):
            control.take(stage, counts(second, 5 * second))
    assert control.limit >= 1


def test_as_many_as_the_memory_of_the_smallest_machine_holds() -> None:
    order, goal = machines("anna", "ben", "carl"), Goal()
    cuts = [LAYERS // 3, 2 * LAYERS // 3]
    held = memory_bytes(model(), goal, 9)[0, cuts[0]]
    order[0] = replace(order[0], memory_bytes=int(held) + 1)
    providers = {p.name: p for p in order}
    cluster = cluster_of(model(), goal, Network(), order, cuts, 4)
    assert max_in_flight(model(), goal, providers, cluster) == 9
    assert max_in_flight(model(), replace(goal, max_staleness=6), providers, cluster) == 7
    assert max_in_flight(model(), replace(goal, max_staleness=0), providers, cluster) == 4, "never less than planned"


def test_a_line_carries_one_after_the_other() -> None:
    link = Link(bytes_per_second=100.0, latency_seconds=1.0)
    assert [link.carry(0.0, 50.0), link.carry(0.0, 50.0), link.carry(9.0, 50.0)] == [1.5, 2.0, 10.5]
