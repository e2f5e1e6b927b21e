"""State takes what the foreground leaves, within its budget, and never nothing."""

import pytest

from ravnest.net.pacing.line_rate import FIRST_RATE, UplinkRate
from ravnest.net.pacing.state_rate import DEFAULT_SETTINGS, piece_bytes, state_rate

HOME = 10e6 / 8


@pytest.mark.parametrize("line", [1e6 / 8, HOME, 125e6])
def test_state_takes_its_budget_of_a_free_line_and_its_floor_of_a_full_one(line: float) -> None:
    rate, reason = state_rate(line, 0.0)
    assert rate == pytest.approx(0.15 * line) and "15%" in reason
    for used in (line, 3 * line):
        rate, reason = state_rate(line, used)
        assert rate == pytest.approx(0.03 * line) and "keeps 3%" in reason


def test_state_takes_most_of_what_a_busy_foreground_leaves() -> None:
    rate, reason = state_rate(HOME, 0.9 * HOME)
    assert rate == pytest.approx(0.09 * HOME) and "90% of the rest" in reason


def test_a_round_has_no_budget_and_yields_all_the_same() -> None:
    assert state_rate(HOME, 0.0, has_budget=False)[0] == pytest.approx(0.9 * HOME)
    assert state_rate(HOME, 0.5 * HOME, has_budget=False)[0] == pytest.approx(0.45 * HOME)
    assert state_rate(HOME, HOME, has_budget=False)[0] == pytest.approx(0.03 * HOME)


def test_a_piece_occupies_a_line_for_a_moment_and_is_never_tiny_or_huge() -> None:
    assert piece_bytes(HOME) / HOME <= 0.025
    assert piece_bytes(1e5) == DEFAULT_SETTINGS.min_piece_bytes
    assert piece_bytes(1e9) == DEFAULT_SETTINGS.max_piece_bytes


def test_a_connection_on_the_same_network_does_not_raise_the_rate_of_a_line_that_leads_outside() -> None:
    line = UplinkRate()
    line.measured(100 * HOME, is_nearby=True)
    line.proved(120 * HOME, is_nearby=True)
    assert line.bytes_per_second == 120 * HOME, "all machines are on one network"
    line.measured(HOME)
    line.measured(100 * HOME, is_nearby=True)
    assert line.bytes_per_second == HOME and line.reason == "measured"
    line.proved(1.2 * HOME)
    assert line.bytes_per_second == 1.2 * HOME and "seen on its links" in line.reason


def test_a_line_is_what_was_measured_or_else_what_transfers_show() -> None:
    line = UplinkRate()
    assert line.bytes_per_second == FIRST_RATE and "assumed" in line.reason
    for seconds in (0.1, 0.1, 5.0):  # the last one met something else on the line
        line.observed(int(0.1 * HOME), seconds)
    assert line.bytes_per_second == pytest.approx(HOME) and "learned" in line.reason
    line.measured(2 * HOME)
    line.measured(HOME)  # towards a machine with a slower line
    line.observed(1000, 1.0)
    assert line.bytes_per_second == 2 * HOME and line.reason == "measured"
    line.proved(HOME)
    assert line.reason == "measured"
    line.proved(3 * HOME)  # something else used the line while it was measured
    assert line.bytes_per_second == 3 * HOME and "seen on its links" in line.reason
    line.limit(HOME / 2)
    assert line.bytes_per_second == HOME / 2 and line.reason == "the user's limit"
