"""A machine remembers its measured speed for as long as it is worth something."""

import asyncio
import dataclasses
import json
import os
import stat
import time
from pathlib import Path

import pytest
import torch

from ravnest.cores import usable_cores
from ravnest.engine.speed.device_speed import Speed, measure_speed
from ravnest.provider.machine import speed_cache as measuring
from ravnest.provider.machine.memory import peak_bytes, resident_bytes
from ravnest.provider.machine.speed_cache import (
    KEPT_SECONDS,
    Load,
    Setup,
    device_name,
    keep,
    machine_speed,
    read_kept,
)

CPU = torch.device("cpu")
FIGURES = Speed(95e9, 30e9, 190e9, 9e9)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ravnest" / "speed"


def test_the_second_time_nothing_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_speed", lambda device, memory_bytes: FIGURES)
    assert asyncio.run(machine_speed(CPU, 1 << 30)) == FIGURES
    monkeypatch.setattr(measuring, "measure_speed", None)
    assert asyncio.run(machine_speed(CPU, 1 << 30)) == FIGURES
    assert [stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()] == [0o600]
    with pytest.raises(TypeError):
        asyncio.run(machine_speed(CPU, 1 << 30, fresh=True))


@pytest.mark.parametrize(
    "changes",
    [{"name": "another"}, {"threads": 99}, {"torch_version": "2.0"}, {"measurement": 0}, {"device": "cuda:0"}],
)
def test_a_figure_counts_only_for_what_it_was_measured_with(cache: Path, changes: dict[str, object]) -> None:
    setup = Setup.here(CPU)
    keep(setup, FIGURES)
    assert read_kept(setup) == FIGURES
    assert read_kept(dataclasses.replace(setup, **changes)) is None  # type: ignore[arg-type]


def test_an_old_figure_is_measured_again(cache: Path) -> None:
    setup = Setup.here(CPU)
    keep(setup, FIGURES, now=1000.0)
    assert read_kept(setup, now=1000.0 + KEPT_SECONDS - 1) == FIGURES
    assert read_kept(setup, now=1000.0 + KEPT_SECONDS + 1) is None
    assert read_kept(setup, now=0.0) is None, "kept by a clock that was wrong"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-10],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "flops_per_second": "fast"}),
        lambda text: json.dumps({**json.loads(text), "flops_per_second": -1}),
        lambda text: json.dumps({**json.loads(text), "memory_bytes_per_second": float("nan")}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "bfloat16_flops_per_second"}),
        lambda text: json.dumps({**json.loads(text), "setup": {}}),
        lambda text: "\udcff",
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch, damage) -> None:  # type: ignore[no-untyped-def]
    setup = Setup.here(CPU)
    keep(setup, FIGURES)
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    assert read_kept(setup) is None
    monkeypatch.setattr(measuring, "measure_speed", lambda device, memory_bytes: FIGURES)
    asyncio.run(machine_speed(CPU, 1 << 30))
    assert read_kept(setup) == FIGURES
    assert list(cache.iterdir()) == [path]


def test_a_figure_from_a_busy_moment_is_used_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([Load(0, 4, 100, 10), Load(1, 4, 103, 11)])
    monkeypatch.setattr(Load, "now", lambda: next(loads))
    monkeypatch.setattr(measuring, "measure_speed", lambda device, memory_bytes: FIGURES)
    assert asyncio.run(machine_speed(CPU, 1 << 30)) == FIGURES
    assert read_kept(Setup.here(CPU)) is None


@pytest.mark.parametrize(
    ("after", "busy"),
    [
        (Load(1, 4, 104, 14), False),
        (Load(1, 4, 104.5, 14), False),
        (Load(1, 4, 104, 12), True),
        (Load(0.1, 4, 100.4, 10), False),
    ],
)
def test_a_machine_is_busy_when_others_compute_on_it(after: Load, busy: bool) -> None:
    assert after.busy_with_others_since(Load(0, 4, 100, 10)) is busy


def test_the_load_is_that_of_this_machine() -> None:
    before = Load.now()
    deadline = time.process_time() + 0.05
    while time.process_time() < deadline:
        pass
    after = Load.now()
    assert after.own_seconds > before.own_seconds
    assert after.all_seconds >= before.all_seconds > 0


def test_where_nothing_can_be_kept_it_is_measured_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ravnest").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "measure_speed", lambda device, memory_bytes: FIGURES)
    assert asyncio.run(machine_speed(CPU, 1 << 30)) == FIGURES
    assert read_kept(Setup.here(CPU)) is None


def test_what_measuring_takes_is_not_counted_as_the_stages(cache: Path) -> None:
    # The first computations of a process load code that stays.
    measure_speed(CPU, 1 << 20, 0.01)
    baseline = resident_bytes()
    asyncio.run(machine_speed(CPU, 4 << 30, fresh=True))
    assert peak_bytes(CPU) - baseline < 100 << 20


def test_the_machine_has_a_name_and_cores() -> None:
    assert device_name(CPU)
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
