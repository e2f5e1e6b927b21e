"""Deadlines of a round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.deadlines import Deadline, Deadlines, PhaseTime


def test_a_deadline_begins_with_the_estimate() -> None:
    deadline = Deadline.expecting(40.0, 10.0)
    assert deadline.seconds == pytest.approx(120.0)
    assert 1.0 < Deadline.expecting(0.001, 5.0).seconds < 60.0


def test_it_follows_a_slower_round_at_once_and_shrinks_slowly() -> None:
    deadline = Deadline.expecting(10.0, 5.0)
    longer = deadline.after(PhaseTime(100.0))
    assert longer.seconds == pytest.approx(300.0)
    shorter = longer.after(PhaseTime(1.0))
    assert 0.8 * longer.seconds < shorter.seconds < longer.seconds
    for _ in range(100):
        shorter = shorter.after(PhaseTime(10.0))
    assert shorter.seconds == pytest.approx(30.0)


def test_it_grows_when_members_were_cut_off_and_comes_back_when_they_are_not() -> None:
    deadline = Deadline.expecting(10.0, 10.0)
    grown = deadline.after(PhaseTime(5.0, cut_off=1))
    assert grown.seconds == pytest.approx(2 * deadline.seconds)
    for _ in range(100):
        grown = grown.after(PhaseTime(10.0))
    assert grown.seconds == pytest.approx(30.0)


def test_the_dead_do_not_make_it_grow_for_ever() -> None:
    deadline = Deadline.expecting(10.0, 5.0)
    for _ in range(50):
        deadline = deadline.after(PhaseTime(5.0, cut_off=3))
    assert deadline.seconds == 1800.0
    assert deadline.after(PhaseTime(5.0)).seconds < 1800.0


@given(st.floats(0.0, 1e5), st.lists(st.builds(PhaseTime, st.floats(0.0, 1e5), st.integers(0, 3)), max_size=30))
def test_a_deadline_stays_within_its_limits_and_covers_the_last_round(
    estimate: float, history: list[PhaseTime]
) -> None:
    deadline = Deadline.expecting(estimate, 5.0)
    for took in history:
        deadline = deadline.after(took)
        assert 5.0 <= deadline.seconds <= 1800.0
        if not took.cut_off:
            assert deadline.seconds >= min(took.seconds, 1800.0)


def test_a_run_learns_from_the_slowest_ring_of_a_round() -> None:
    deadlines = Deadlines(10.0, 80.0, 20.0)
    assert (deadlines.joining.seconds, deadlines.reducing.seconds) == (30.0, 60.0)
    assert deadlines.catching_up.seconds == pytest.approx(240.0), "an anchor takes longer than a reduce"
    deadlines.learn([PhaseTime(11.0), PhaseTime(50.0), None], [None], [PhaseTime(100.0), PhaseTime(3.0)])
    assert deadlines.catching_up.seconds == pytest.approx(240.0)
    assert deadlines.joining.seconds == pytest.approx(150.0)
    assert deadlines.reducing.seconds == pytest.approx(300.0)
    # One ring that cut a member off is enough, though another ring took longer.
    deadlines.learn([PhaseTime(1.0, cut_off=1), PhaseTime(2.0)], [PhaseTime(9.0, cut_off=1)], [PhaseTime(1.0)])
    assert deadlines.catching_up.seconds == pytest.approx(480.0)
    assert deadlines.joining.seconds == pytest.approx(300.0)
    assert deadlines.reducing.seconds == pytest.approx(270.0)


def test_a_run_learns_nothing_from_a_phase_that_no_ring_reached() -> None:
    deadlines = Deadlines(10.0, 20.0, 20.0)
    before = deadlines.joining, deadlines.reducing
    deadlines.learn([None, None], [], [])
    assert (deadlines.joining, deadlines.reducing) == before
    deadlines.learn([PhaseTime(20.0)], [], [None])
    assert deadlines.joining.seconds == pytest.approx(60.0) and deadlines.reducing == before[1]


def test_deadlines_of_a_run_grow_with_slow_rounds_and_shrink_with_fast_ones() -> None:
    deadlines = Deadlines(1.0, 1.0, 1.0)
    deadlines.learn([PhaseTime(10.0)], [], [PhaseTime(40.0)])
    grown = deadlines.joining.seconds, deadlines.reducing.seconds
    assert grown == (pytest.approx(30.0), pytest.approx(120.0))
    for _ in range(100):
        deadlines.learn([PhaseTime(2.0), PhaseTime(0.1)], [], [PhaseTime(5.0), PhaseTime(0.1)])
    assert deadlines.joining.seconds == pytest.approx(6.0) and deadlines.reducing.seconds == pytest.approx(15.0)
