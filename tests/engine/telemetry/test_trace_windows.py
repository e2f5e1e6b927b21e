"""Which microbatches are traced: the beginning, and ever rarer windows as a run goes on."""

import pytest

from ravnest.engine.telemetry.trace_windows import window_of, window_size


def test_windows_begin_after_2_4_8_times_as_many_microbatches() -> None:
    windows: dict[int, list[int]] = {}
    for offset in range(1000):
        found = window_of(offset, 10)
        if found is not None:
            windows.setdefault(found, []).append(offset)
    assert [numbers[0] for numbers in windows.values()] == [0, 20, 40, 80, 160, 320, 640]
    assert all(len(numbers) == 10 for numbers in windows.values())
    assert list(windows) == [0, 1, 2, 3, 4, 5, 6]


def test_two_windows_are_as_many_microbatches_as_were_asked_for() -> None:
    assert [window_size(count) for count in (0, 1, 2, 5, 200)] == [0, 1, 1, 3, 100]


def test_what_comes_before_the_first_is_not_traced() -> None:
    assert window_of(-1, 10) is None


@pytest.mark.parametrize("offset", [10**6, 2**40, 2**62])
def test_a_long_run_has_few_windows(offset: int) -> None:
    found = window_of(offset, 100)
    assert found is None or found < 64
