"""`job.train()` from a program, a notebook or a thread; a swarm that waits costs nothing."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ravnest import RunError, TrainResult
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import Batch, a_job, batches
from tests.swarms.embedded import providers_of


def test_inside_a_running_event_loop_as_a_notebook_has_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))

    async def cell() -> TrainResult:
        result = a_job().train(providers=1, run=tmp_path / "run")
        await asyncio.sleep(0)
        return result

    result = asyncio.run(cell())
    assert result.summary.status == "finished"
    assert result.run == tmp_path / "run"
    assert result.model == tmp_path / "run/model.safetensors" and result.model.exists()
    assert set(psutil.Process().children(recursive=True)) <= before
    told = capfd.readouterr()
    assert told.out == ""
    assert "Finished in" in told.err
    # Asked again, it says what is there rather than writing over it.
    with pytest.raises(RunError, match="already holds a run"):
        a_job().train(providers=1, run=tmp_path / "run")


def test_in_a_thread_that_is_not_the_main_one(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    results: list[Any] = []

    def work() -> None:
        results.append(swarm.train(a_job(), providers=2, run=tmp_path / "run", display=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [result.summary.status for result in results] == ["finished"]


def test_a_provider_that_waits_for_data_leaves_the_machine_alone(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    used: list[float] = []

    def slow() -> Iterator[Batch]:
        yield from batches([8] * 5)
        threading.Event().wait(0.5)  # What came with the last batch is done by then.
        before, started = cpu_seconds(swarm), time.monotonic()
        threading.Event().wait(3)
        took = time.monotonic() - started
        used.extend((after - start) / took for start, after in zip(before, cpu_seconds(swarm), strict=True))
        yield from batches([8])

    swarm.train(a_job(slow), providers=3, run=tmp_path / "run", display=False)
    # With the model captured on the first two batches, the data is walked once.
    assert len(used) == len(providers_of(swarm))
    assert max(used) < 0.02, used


def cpu_seconds(swarm: EmbeddedSwarm) -> list[float]:
    times = [process.cpu_times() for process in providers_of(swarm)]
    return [found.user + found.system for found in times]
