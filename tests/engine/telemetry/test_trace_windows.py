"""Trace windows: the beginning of a run, and ever rarer windows later."""

import pytest

from ravnest.engine.telemetry.trace_windows import window_of, window_size


def test_windows_begin_after_2_4_8_times_their_length() -> None:
    windows: dict[int, list[int]] = {}
    for offset in range(1000):
        found = window_of(offset, 10)
        if found is not None:
            windows.setdefault(found, []).append(offset)
    assert [numbers[0] for numbers in windows.values()] == [0, 20, 40, 80, 160, 320, 640]
    assert all(len(numbers) == 10 for numbers in windows.values())
    assert list(windows) == [0, 1, 2, 3, 4, 5, 6]


def test_two_windows_have_the_requested_number_of_microbatches() -> None:
    assert [window_size(count) for count in (0, 1, 2, 5, 200)] == [0, 1, 1, 3, 100]


def test_microbatches_before_the_first_are_not_traced() -> None:
    assert window_of(-1, 10) is None


@pytest.mark.parametrize("offset", [10**6, 2**40, 2**62])
def test_a_long_run_has_few_windows(offset: int) -> None:
    found = window_of(offset, 100)
    assert found is None or found < 64
