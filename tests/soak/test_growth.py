"""The check of long runs can fail: what leaks is found, and what only goes up and down is not."""

import random

import psutil
import pytest

from tests.soak.growth import Limit, growth, theil_sen
from tests.soak.soaking import FILES_LIMIT, MEMORY_LIMIT, THREADS_LIMIT, Sample, Soak

LIMIT = Limit(6.0, "noise")


def noisy(seconds: int, per_second: float, noise: float = 1.0, start: float = 200.0) -> list[tuple[float, float]]:
    chance = random.Random(1)
    return [(at, start + per_second * at + chance.uniform(-noise, noise)) for at in map(float, range(seconds))]


def test_a_leak_is_found_under_noise() -> None:
    found = growth("coordinator", "memory in MiB", noisy(60, 0.5), LIMIT)
    assert found.grows and found.per_hour == pytest.approx(1800, rel=0.05)
    assert "memory in MiB of coordinator" in str(found) and "limit 6: noise" in str(found)


@pytest.mark.parametrize("per_second", [0.0, -0.5], ids=["level", "shrinking"])
def test_what_does_not_grow_is_not_found(per_second: float) -> None:
    assert not growth("coordinator", "memory", noisy(60, per_second, noise=4.0), LIMIT).grows


def test_what_grows_while_a_run_is_young_does_not_count() -> None:
    series = [(at, min(100.0 + 10 * at, 300.0)) for at in map(float, range(60))]
    assert not growth("coordinator", "memory", series, LIMIT).grows


def test_a_saw_tooth_and_a_few_peaks_are_not_growth() -> None:
    teeth = [(at, 200.0 + at % 12) for at in map(float, range(63))]
    assert not growth("coordinator", "memory", teeth, LIMIT).grows
    peaks = [(at, 500.0 if at % 7 == 6 else 200.0) for at in map(float, range(63))]
    assert not growth("coordinator", "memory", peaks, LIMIT).grows


def test_a_leak_of_two_hours_is_found_among_many_measurements() -> None:
    # 5 MiB an hour: a gigabyte in eight days.
    series = [(18.0 * at, value) for at, value in noisy(400, 18 * 5 / 3600)]
    assert growth("coordinator", "memory", series, MEMORY_LIMIT).grows
    assert not growth("coordinator", "memory", [(18.0 * at, value) for at, value in noisy(400, 0)], LIMIT).grows


def test_a_quarter_of_the_points_may_be_anything() -> None:
    series = [(at, 2 * at + (1e6 if at % 5 == 0 else 0)) for at in map(float, range(50))]
    assert theil_sen(series) == pytest.approx(2.0)


def test_too_few_measurements_tell_nothing() -> None:
    with pytest.raises(ValueError, match="8 measurements of threads after the warm-up tell nothing"):
        growth("coordinator", "threads", noisy(12, 1.0), LIMIT)


@pytest.mark.parametrize("leaking", ["memory in MiB", "open files", "threads"])
def test_each_figure_of_a_process_is_looked_at(leaking: str) -> None:
    seen = Soak()
    for at in range(80):
        seen.processes["coordinator"].append(Sample(at / 2, 300.0, 20, 16))
        seen.processes["provider-1"].append(
            Sample(
                at / 2,
                200.0 + at * (leaking == "memory in MiB"),
                16 + at // 4 * (leaking == "open files"),
                11 + at // 4 * (leaking == "threads"),
            )
        )
    assert [(found.process, found.what) for found in seen.growths() if found.grows] == [("provider-1", leaking)]


def test_a_run_that_comes_to_a_halt_is_told_from_one_that_trains() -> None:
    seen = Soak()
    seen.updates = [(float(at), 100 * at) for at in range(60)]
    assert seen.slowest_third() == pytest.approx(1.0)
    seen.updates = [(float(at), 100 * min(at, 30)) for at in range(60)]
    assert seen.slowest_third() == 0.0


def test_a_process_is_measured_by_what_is_its_own() -> None:
    seen, process = Soak(), psutil.Process()
    seen.look("this", process, 1.0)
    [sample] = seen.processes["this"]
    assert 10 < sample.memory_mib <= process.memory_info().rss / 2**20 + 50
    assert sample.files >= 3 and sample.threads >= 1
    assert FILES_LIMIT.amount < 3 and THREADS_LIMIT.amount < 3
