"""Killed processes and full disks end a run with one sentence; nothing hangs, and nothing saved is lost."""

import json
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ravnest import RunError, TrainingError
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from ravnest.monitor.summary import Summary
from tests.e2e.command import Running, ravnest, still_there, within
from tests.e2e.jobs import Batch, a_job, a_job_file, batches, every_updates
from tests.swarms.embedded import providers_of

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
    with Running("train", "job.py", "--providers", "2", "--run", "run", folder=tmp_path, warm=True) as running:
        running.until("] training")
        providers = running.providers()
        assert len(providers) == 2
        with within(4, "the providers' end"):
            running.process.kill()
            running.process.wait()
            assert still_there(providers, within_seconds=10) == []
        said = running.to_the_end()
        # The worker of the data loader looks after its parent every five seconds.
        assert running.left_behind(within_seconds=12) == []
    assert "Traceback" not in said and "error" not in said, said
    shown = ravnest("status", "run", folder=tmp_path).stdout
    assert "interrupted  its process is gone; continue the run with --resume" in shown


def test_a_run_that_loses_all_its_providers_ends_with_a_sentence_at_once(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    with EmbeddedSwarm(2) as own:
        victims = providers_of(own)

        def killing() -> Iterator[Batch]:
            yield from batches([8] * 5)
            while not list((tmp_path / "run/checkpoints").glob("0*")):
                threading.Event().wait(0.01)
            for victim in victims:
                victim.kill()
            # As a stream that has nothing new for a while: the run must not wait for it.
            threading.Event().wait(60)

        with pytest.raises(TrainingError) as raised:
            own.train(a_job(killing, checkpoint=every_updates(2)), run=tmp_path / "run", display=False)
        with pytest.raises(TrainingError, match="all providers of this swarm have ended; start another one"):
            own.train(a_job(), run=tmp_path / "another", display=False)
    text = str(raised.value)
    assert re.match(r"provider-\d, which held stage \d, is gone: it was killed", text), text
    assert (
        "the remaining providers cannot continue: no provider is connected; " in text
        and "continue from it with --resume" in text
    )
    summary = Summary.read(tmp_path / "run/summary.json")
    assert (summary.status, summary.reason) == ("failed", text)
    assert summary.first_update_seconds is not None and summary.seconds - summary.first_update_seconds < 45
    assert {fault.provider for fault in summary.faults} == {"provider-0", "provider-1"}
    assert {(fault.kind, fault.recovered_seconds) for fault in summary.faults} == {("provider_lost", None)}
    resumed = swarm.train(a_job(batches([8] * 8)), providers=2, run=tmp_path / "run", resume=True, display=False)
    assert resumed.summary.updates == 8


def wide() -> Any:
    """Half a megabyte of parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 480), nn.ReLU(), nn.Linear(480, 3))


@contextmanager
def a_small_disk(folder: Path, kilobytes: int = 1500) -> Iterator[Path]:
    """Room for two checkpoints and no third, unless it is of another size."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_older_checkpoints_make_room_on_a_disk_that_is_nearly_full(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "checkpoint": every_updates(2)}
    with a_small_disk(tmp_path / "disk") as disk:
        job = a_job(batches([8] * 12), model=wide(), **settings)
        result = swarm.train(job, providers=2, run=disk / "run", display=False)
        assert (result.summary.status, result.summary.updates) == ("finished", 12)
        assert "0000000012" in [path.name for path in (disk / "run/checkpoints").iterdir()]
        assert result.model is not None and result.model.exists()
        assert len(list((disk / "run/checkpoints").iterdir())) == 1, "the model has the room of the one before"


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_given_up_and_training_goes_on(
    swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "checkpoint": every_updates(2)}
    with a_small_disk(tmp_path / "disk", 1000) as disk:
        run = disk / "run"
        with pytest.raises(RunError) as raised:
            swarm.train(a_job(batches([8] * 12), model=wide(), **settings), providers=2, run=run, display=False)
        text = str(raised.value)
        assert "the run cannot be saved" in text and "continue with --resume" in text and "\n" not in text
        summary = Summary.read(run / "summary.json")
        assert (summary.status, summary.reason, summary.updates) == ("failed", text, 12)
        full = [event for event in read_events(run / "events.jsonl") if event["kind"] == "disk_full"]
        assert len(full) >= 4, "every one after the first"
        assert all(event["missing_bytes"] > 0 and "training goes on" in event["reason"] for event in full)
        kept = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert kept == ["0000000002"]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        job = a_job(batches([8] * 12), model=wide(), **settings)
        assert swarm.train(job, providers=2, run=run, resume=True, display=False).summary.updates == 12
        reasons = [event["reason"] for event in read_events(run / "events.jsonl")]
        assert f"resumed after {int(kept[-1])} updates" in reasons


def fill(disk: Path) -> None:
    """Takes all that is left on it."""
    with open(disk / "of somebody else", "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def test_a_disk_without_room_for_a_line_of_the_log_ends_the_run_in_order(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "checkpoint": every_updates(4)}
    with a_small_disk(tmp_path / "disk", 2500) as disk:
        run = disk / "run"

        def data() -> Iterator[Batch]:
            for number, batch in enumerate(batches([8] * 400)):
                if number >= 20:
                    # Whatever room is made.
                    fill(disk)
                yield batch

        with pytest.raises(RunError, match=r"the disk is full; free some space") as raised:
            swarm.train(a_job(data, model=wide(), **settings), providers=2, run=run, display=False)
        summary = Summary.read(run / "summary.json")
        assert (summary.status, summary.reason) == ("failed", str(raised.value))
        kept = [path.name for path in (run / "checkpoints").iterdir()]
        assert kept and all(re.fullmatch(r"\d{10}", name) for name in kept)
        (disk / "of somebody else").unlink()
        job = a_job(batches([8] * 24), model=wide(), **settings)
        assert swarm.train(job, providers=2, run=run, resume=True, display=False).summary.updates == 24


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
