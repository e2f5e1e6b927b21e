"""How many cores a process may use, and what share of them each of several providers takes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.cores import fair_share, quota_cores, usable_cores


@given(cores=st.integers(1, 256), providers=st.integers(1, 64))
def test_shares_use_every_core_and_none_twice_where_there_are_enough(cores: int, providers: int) -> None:
    shares = [fair_share(cores, providers, place) for place in range(providers)]
    assert min(shares) >= 1 and max(shares) - min(shares) <= 1
    assert sum(shares) == max(cores, providers)


@pytest.mark.parametrize(
    ("files", "path", "cores"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, "0::/a/b", 4.0),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}, "0::/a/b", 2.0),
        # In a container the path may be that of the machine.
        ({"cpu.max": "100000 100000"}, "0::/docker/0123", 1.0),
        (
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/a\n2:memory:/b",
            3.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "nonsense"}, "0::/", None),
        ({}, "0::/", None),
        ({}, "nonsense", None),
    ],
)
def test_a_quota_of_processor_time_counts_as_cores(
    files: dict[str, str], path: str, cores: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "own").write_text(path)
    assert quota_cores(tmp_path / "groups", tmp_path / "own") == cores


def test_this_process_may_use_a_core() -> None:
    assert usable_cores() >= 1
