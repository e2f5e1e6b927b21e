"""Where the learning rate is high few are in flight, and as it falls as many as there were."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.planner.cluster import cluster_of
from ravnest.planner.in_flight.control import FlightControl
from ravnest.planner.in_flight.lr_bound import CAUTIOUS_STALENESS, cautious_flight, slowed_by_caution
from ravnest.planner.problem import Goal, Network
from tests.planner.made_up import machine, model


@pytest.mark.parametrize(
    ("stages", "accumulate", "share", "most"),
    [
        (2, 1, 1.0, 1 + CAUTIOUS_STALENESS),
        (8, 1, 1.0, 8),
        (8, 1, 0.5, 1 + 2 * CAUTIOUS_STALENESS),
        (8, 1, 0.1, 1 + 10 * CAUTIOUS_STALENESS),
        (2, 64, 1.0, 65),
        (8, 1, 0.0, 1 + 1000 * CAUTIOUS_STALENESS),
    ],
)
def test_the_higher_the_rate_the_fewer_and_never_fewer_than_stages(
    stages: int, accumulate: int, share: float, most: int
) -> None:
    assert cautious_flight(stages, accumulate, share) == most


def test_a_run_is_slower_by_the_time_that_it_has_too_few_in_flight() -> None:
    far = [machine("anna", latency=0.05), machine("ben", latency=0.05)]
    cluster = cluster_of(model(), Goal(), Network(), far, [6], 10)
    assert 2 < cluster.round_trip_seconds / cluster.busiest_seconds < 10
    assert slowed_by_caution(cluster, {}) == slowed_by_caution(cluster, {10: 1, 50: 1}) == 1.0
    assert all(slowed_by_caution(cluster, {10: first, 99: 7}) == 1.0 for first in range(1, 200))
    # Half of the microbatches take as long as two in flight do.
    slow = replace(cluster, in_flight=2).samples_per_second / cluster.samples_per_second
    assert slowed_by_caution(cluster, {2: 30, 20: 30}) == pytest.approx(2 / (1 / slow + 1))


def test_what_is_allowed_moves_the_limit_down_and_up_again_to_where_it_was() -> None:
    control = FlightControl(stages=8, limit=12, most=40)
    assert not control.is_held
    assert not control.allow(12) and control.is_held, "more might be enough, and are not allowed"
    assert control.allow(8) and control.limit == 8 and control.is_held
    assert not control.allow(8)
    assert control.allow(10) and control.limit == 10
    assert control.allow(30) and control.limit == 12 and not control.is_held
    assert not control.allow(40)


def test_what_memory_holds_stays_whatever_is_allowed() -> None:
    control = FlightControl(stages=8, limit=12, most=40)
    control.allow(8)
    assert not control.hold(9) and control.limit == 8
    assert control.allow(20) and control.limit == 9
    assert control.hold(3) and control.limit == 3
    assert not control.allow(30) and control.limit == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=30))
def test_the_limit_never_exceeds_either_bound(steps: list[tuple[bool, int]]) -> None:
    control = FlightControl(stages=4, limit=12, most=40)
    memory, allowed = 40, 40
    for is_memory, most in steps:
        if is_memory:
            memory = most
            control.hold(most)
        else:
            allowed = most
            control.allow(most)
        assert 1 <= control.limit <= min(memory, allowed) and control.limit <= control.wanted
