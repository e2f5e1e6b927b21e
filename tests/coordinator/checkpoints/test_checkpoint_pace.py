"""Checkpoints are begun early enough that no more than one interval is ever at risk."""

from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator.checkpoints.pace import CheckpointPace


def test_the_first_is_begun_after_a_whole_interval() -> None:
    assert CheckpointPace().updates_between(10) == 10
    assert CheckpointPace().seconds_between(60.0) == 60.0


def test_the_next_is_begun_early_by_what_the_last_took_to_be_written() -> None:
    pace = CheckpointPace().trained(updates=20, seconds=2.0).wrote(0.25)
    assert pace.updates_between(10) == 7
    assert pace.seconds_between(60.0) == 59.75


def test_a_slow_one_is_remembered_for_a_while() -> None:
    pace = CheckpointPace().wrote(10.0).wrote(1.0)
    assert pace.seconds_between(60.0) == 52.0
    for _ in range(20):
        pace = pace.wrote(1.0)
    assert pace.seconds_between(60.0) == 59.0


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.integers(0, 10_000), st.floats(0, 1e6))
def test_never_more_than_an_interval_nor_less_than_half_of_it(
    every: int, written_seconds: float, updates: int, seconds: float
) -> None:
    between = CheckpointPace().trained(updates, seconds).wrote(written_seconds).updates_between(every)
    assert every / 2 <= between <= every
