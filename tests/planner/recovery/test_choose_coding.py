"""The coding of replicas follows from the part, the line and what the user asks for."""

import pytest

from ravnest.planner.recovery.choose_coding import choose_coding
from ravnest.state.codings import EXACT, INT8, LOSSLESS

MBIT = 125_000.0


@pytest.mark.parametrize(
    ("megabytes", "mbit", "coding"),
    [(1, 10, EXACT), (63, 10, INT8), (63, 100, LOSSLESS), (63, 1000, EXACT), (600, 100, INT8), (600, 1000, LOSSLESS)],
)
def test_the_slower_the_line_the_fewer_bytes(megabytes: int, mbit: float, coding: str) -> None:
    found = choose_coding(megabytes * 10**6, mbit * MBIT, is_exact=False, is_local=False)
    assert found.coding == coding and "15%" in found.reason.replace(" ", "")


def test_exact_state_is_never_rounded() -> None:
    found = choose_coding(10**9, MBIT, is_exact=True, is_local=False)
    assert found.coding == LOSSLESS and "checkpoint.exact" in found.reason


def test_one_machine_sends_state_as_it_is() -> None:
    assert choose_coding(10**9, 1.0, is_exact=False, is_local=True).coding == EXACT


@pytest.mark.parametrize("rate", [None, 0.0, float("nan"), -1.0])
def test_a_line_that_is_not_measured_rounds_nothing(rate: float | None) -> None:
    assert choose_coding(10**9, rate, is_exact=False, is_local=False).coding == LOSSLESS
