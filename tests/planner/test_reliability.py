"""Reliability follows from what a swarm saw of a machine, and decides how many machines are kept back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.planner.reliability import NEVER_SEEN, Attendance, estimate_reliability, expected_absent

HOUR = 3600.0
counts = st.integers(0, 1000)
attendances = st.builds(Attendance, counts, st.floats(0, 1e9), losses=counts, departures=counts, interruptions=counts)


def test_a_machine_that_was_never_seen_counts_as_reliable() -> None:
    found = estimate_reliability(NEVER_SEEN)
    assert found.value == 1.0 and "never seen" in found.reason


def test_a_machine_that_stays_is_reliable_and_the_reason_says_how_long_it_stayed() -> None:
    found = estimate_reliability(Attendance(stays=2, connected_seconds=90 * 60))
    assert (found.value, found.reason) == (1.0, "reliability 1.00: never lost in 2 stays of 1.5 h in all")


def test_a_loss_costs_more_than_a_departure_and_that_more_than_an_interruption() -> None:
    seen = [Attendance(1, losses=1), Attendance(1, departures=1), Attendance(1, interruptions=1)]
    values = [estimate_reliability(each).value for each in seen]
    assert values == sorted(set(values)) and values[-1] < 1


def test_a_machine_that_is_connected_for_long_after_a_loss_is_trusted_again() -> None:
    values = [estimate_reliability(Attendance(2, hours * HOUR, losses=1)).value for hours in (0, 5, 100)]
    assert values == sorted(set(values)) and values[-1] == 1.0


@given(seen=attendances)
def test_whatever_was_seen_the_figure_is_one_that_a_nodes_file_may_have(seen: Attendance) -> None:
    assert 0 < estimate_reliability(seen).value <= 1


def test_one_loss_keeps_no_machine_back_and_two_losses_do() -> None:
    once, twice = (estimate_reliability(Attendance(2, 0.0, losses=losses)).value for losses in (1, 2))
    assert expected_absent([1.0, 1.0, once]) == 0
    assert expected_absent([1.0, 1.0, twice]) == expected_absent([1.0, once, once]) == 1


@pytest.mark.parametrize(("reliabilities", "kept_back"), [([0.9], 1), ([0.98] * 4, 0), ([0.98] * 5, 1), ([0.5] * 4, 2)])
def test_as_many_are_kept_back_as_are_likely_to_be_missing_rounded_up(
    reliabilities: list[float], kept_back: int
) -> None:
    assert expected_absent(reliabilities) == kept_back
