"""Killed processes and full disks end a run with one sentence; nothing hangs, and nothing saved is lost."""

import json
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ravnest import RunError, TrainingError
from ravnest.coordinator.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from ravnest.monitor.summary import Summary
from tests.e2e.command import Running, ravnest, within
from tests.e2e.jobs import Batch, a_job, a_job_file, batches, every_updates

WITH_WORKERS = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from batches
"""


def test_providers_end_by_themselves_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    # A DataLoader's worker, forked from the coordinator, must not hold anything of it open.
    a_job_file(
        tmp_path,
        before=WITH_WORKERS,
        data="torch.utils.data.DataLoader(Endless(), batch_size=None, num_workers=1)",
        checkpoint="ravnest.Checkpoint(every_updates=5, every_seconds=None)",
    )
    with Running("train", "job.py", "--providers", "2", "--run", "run", folder=tmp_path) as running:
        running.until("] training")
        providers = running.providers()
        assert len(providers) == 2
        with within(4, "the providers' end"):
            running.process.kill()
            running.process.wait()
            psutil.wait_procs(providers, timeout=10)
        said = running.to_the_end()
        # The worker of the data loader looks after its parent every five seconds.
        assert running.left_behind(within_seconds=12) == []
    assert "Traceback" not in said and "error" not in said, said
    shown = ravnest("status", "run", folder=tmp_path).stdout
    assert "interrupted  its process is gone; continue it with --resume" in shown


def provider_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "--embedded" in child.cmdline()]


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_provider_ends_the_run_with_a_sentence(swarm: EmbeddedSwarm, tmp_path: Path, number: int) -> None:
    shared = set(provider_processes())
    with EmbeddedSwarm(2) as own:
        [victim] = [p for p in set(provider_processes()) - shared if f"provider-{number}" in p.cmdline()]

        def killing() -> Iterator[Batch]:
            yield from batches([8] * 5)
            victim.kill()
            # As a stream that has nothing new for a while: the run must not wait for it.
            threading.Event().wait(60)

        with pytest.raises(TrainingError) as raised:
            own.train(a_job(killing, checkpoint=every_updates(2)), run=tmp_path / "run", display=False)
    text = str(raised.value)
    assert re.match(rf"provider-{number}, which held stage \d, is gone: it was killed", text), text
    assert "continue from it with --resume" in text
    summary = Summary.read(tmp_path / "run/summary.json")
    assert (summary.status, summary.reason) == ("failed", text)
    assert summary.seconds < 45
    [fault] = summary.faults
    assert (fault.kind, fault.provider, fault.recovered_seconds) == ("provider_lost", f"provider-{number}", None)
    resumed = swarm.train(a_job(batches([8] * 8)), providers=2, run=tmp_path / "run", resume=True, display=False)
    assert resumed.summary.updates == 8


def wide() -> Any:
    """Half a megabyte of parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 480), nn.ReLU(), nn.Linear(480, 3))


@contextmanager
def a_small_disk(folder: Path) -> Iterator[Path]:
    """Room for two checkpoints and no third."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    with a_small_disk(tmp_path / "disk") as disk:
        run = disk / "run"
        settings: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "checkpoint": every_updates(2)}
        with pytest.raises(RunError) as raised:
            swarm.train(a_job(batches([8] * 12), model=wide(), **settings), providers=2, run=run, display=False)
        text = str(raised.value)
        assert "the disk is full" in text and "free some space" in text and "\n" not in text
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert len(kept) == 2 and all(re.fullmatch(r"\d{10}", name) for name in kept)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        job = a_job(batches([8] * 12), model=wide(), **settings)
        assert swarm.train(job, providers=2, run=run, resume=True, display=False).summary.updates == 12
        reasons = [event["reason"] for event in read_events(run / "events.jsonl")]
        assert f"resumed after {int(kept[-1])} updates" in reasons


def test_a_limit_on_the_size_of_files_is_told_as_such(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job(batches([8] * 6), model=wide(), checkpoint=every_updates(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .*part-\d.safetensors: file too large; choose another --run"):
            swarm.train(job, providers=2, run=tmp_path / "run", display=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert swarm.train(job, providers=2, run=tmp_path / "afterwards", display=False).summary.updates == 6


def test_a_read_only_place_for_the_run(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    with a_small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RunError, match="read-only file system; choose a --run in a folder you may write to"):
            swarm.train(a_job(), providers=1, run=disk / "run", display=False)
        with pytest.raises(RunError, match="read-only file system; choose a --run in a folder you may write to"):
            a_job().train(run=disk / "run")


def test_signals_of_the_test_run_are_as_they_were(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    swarm.train(a_job(), providers=1, run=tmp_path / "run", display=False)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
