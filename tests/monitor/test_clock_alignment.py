"""The times of different machines are put on one axis, on which no frame arrives before it was sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.monitor.clock_alignment import Crossing, align, offset_of

seconds = st.floats(0.0001, 2.0)
ways = st.lists(st.tuples(st.floats(0, 1000), seconds), min_size=1, max_size=20)


def crossings(ways: list[tuple[float, float]], sender: float, receiver: float) -> list[Crossing]:
    """Frames with a time of departure and a duration, as the clocks of the sender and the receiver show them."""
    return [Crossing(sent + sender, sent + took + receiver) for sent, took in ways]


@given(forward=ways, backward=ways, ahead=st.floats(-1e4, 1e4))
def test_the_offset_is_off_by_no_more_than_half_of_the_quickest_ways(
    forward: list[tuple[float, float]], backward: list[tuple[float, float]], ahead: float
) -> None:
    found = offset_of(crossings(forward, 0.0, ahead), crossings(backward, ahead, 0.0))
    assert found is not None
    quickest = [min(took for _, took in ways) for ways in (forward, backward)]
    # The error is half of the difference of the two ways, and so at most half of their sum.
    assert found + ahead == pytest.approx((quickest[1] - quickest[0]) / 2, abs=1e-6)


@settings(max_examples=60)
@given(
    clocks=st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=6),
    ways=st.lists(st.tuples(ways, ways), min_size=5, max_size=5),
)
def test_no_frame_arrives_before_it_was_sent_on_the_common_axis(
    clocks: list[float], ways: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]
) -> None:
    links, seen = [], []
    for number in range(len(clocks) - 1):
        here, there = clocks[number], clocks[number + 1]
        forward, backward = crossings(ways[number][0], here, there), crossings(ways[number][1], there, here)
        links.append(offset_of(forward, backward))
        seen.append((forward, backward))
    placed = align(links, [0.0] * len(clocks))
    for number, (forward, backward) in enumerate(seen):
        here, there = placed[number], placed[number + 1]
        assert all(each.arrived + there >= each.sent + here - 1e-6 for each in forward)
        assert all(each.arrived + here >= each.sent + there - 1e-6 for each in backward)


def test_equal_ways_give_the_offset_exactly() -> None:
    found = offset_of([Crossing(1.0, 101.25), Crossing(2.0, 102.05)], [Crossing(103.0, 3.05)])
    assert found == pytest.approx(-100.0)


def test_one_direction_alone_is_taken_as_immediate() -> None:
    assert offset_of([Crossing(1.0, 11.5), Crossing(2.0, 12.0)], []) == -10.0
    assert offset_of([], [Crossing(5.0, 3.0)]) == -2.0
    assert offset_of([], []) is None


def test_a_link_that_says_nothing_is_placed_by_the_origins() -> None:
    assert align([None, -3.0], [1.0, 6.0, 0.0]) == [1.0, 6.0, 3.0]


def test_clocks_that_run_apart_still_have_an_offset_between_their_bounds() -> None:
    # The later stage's clock lost a second in the meantime, so the lower bound is above the upper one.
    found = offset_of([Crossing(0.0, 10.0), Crossing(100.0, 109.0)], [Crossing(10.0, 0.5)])
    assert found is not None and -9.6 < found < -8.9
