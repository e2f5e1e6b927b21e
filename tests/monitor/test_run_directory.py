"""A run directory belongs to one coordinator and is never mixed with another run."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunDirectory, RunPaths, check_run, existing_run, lock_holder


def hold_a_checkpoint(path: Path) -> None:
    folder = path / "checkpoints" / "0000000010"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_a_new_run_gets_a_folder_with_room_for_everything(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "deep" / "run", job_name="digits", resume=False) as run:
        assert run.path == tmp_path / "deep" / "run"
        assert run.checkpoints_path.is_dir()
        assert run.summary_path.name == "summary.json"
        assert {run.events_path.name, run.metrics_path.name} == {"events.jsonl", "metrics.jsonl"}
        assert run.model_path.name == "model.safetensors"


def test_runs_without_a_name_never_collide(in_empty_folder: Path) -> None:
    opened = [RunDirectory.open(None, job_name="my job/1", resume=False) for _ in range(3)]
    assert len({run.path for run in opened}) == 3
    assert all(run.path.parent == Path("runs") and run.path.name.startswith("my-job-1-20") for run in opened)
    for run in opened:
        run.close()


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunError, match="already holds a run; continue it with --resume"):
        RunDirectory.open(tmp_path, job_name="digits", resume=False)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(RunError, match="holds other files"):
            RunDirectory.open(tmp_path, job_name="digits", resume=resume)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run at"):
        RunDirectory.open(tmp_path / "nowhere", job_name="digits", resume=True)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(RunError, match=r"there is no run at .* to resume; check --run"):
        RunDirectory.open(tmp_path, job_name="digits", resume=True)


def test_resume_takes_a_run_that_was_killed_before_it_saved_anything(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with RunDirectory.open(tmp_path, job_name="digits", resume=True) as run:
        assert run.path == tmp_path


def test_resume_opens_a_run_with_a_checkpoint_and_clears_half_written_files(tmp_path: Path) -> None:
    hold_a_checkpoint(tmp_path)
    (tmp_path / ".summary.json-12ab34cd.tmp").write_text("{")
    with RunDirectory.open(tmp_path, job_name="digits", resume=True) as run:
        assert sorted(os.listdir(run.path)) == [".reserve.tmp", "checkpoints", "lock"]
    assert sorted(os.listdir(run.path)) == ["checkpoints", "lock"]


def test_resume_without_a_path_takes_the_newest_run_of_the_job(in_empty_folder: Path) -> None:
    for name in (
        "digits-20260101-000000",
        "digits-20260102-000000",
        "digits-20260102-000000-2",
        "digits-big-20270101-000000",
    ):
        hold_a_checkpoint(Path("runs") / name)
    (Path("runs") / "digits-20280101-000000").mkdir()
    with RunDirectory.open(None, job_name="digits", resume=True) as run:
        assert run.path.name == "digits-20260102-000000-2"
    with pytest.raises(RunError, match="no run of other"):
        RunDirectory.open(None, job_name="other", resume=True)


def test_two_coordinators_cannot_use_one_run(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path, job_name="digits", resume=False)
    assert lock_holder(run) == os.getpid()
    for resume in (False, True):
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
            RunDirectory.open(tmp_path, job_name="digits", resume=resume)
    run.close()
    run.close()
    assert lock_holder(run) is None
    hold_a_checkpoint(tmp_path)
    RunDirectory.open(tmp_path, job_name="digits", resume=True).close()


def test_a_killed_coordinator_lets_go_of_its_run_even_if_its_workers_live_on(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from ravnest.monitor.run_directory import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]), job_name="digits", resume=False)
if os.fork() == 0:
    # The worker says so: until it has run, it has not let go of what it was born with.
    print("held", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert lock_holder(RunPaths(tmp_path)) == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lock_holder(RunPaths(tmp_path)) is None
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("below", ["file/run", "file"])
def test_a_path_that_cannot_be_a_folder_is_one_sentence(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"^cannot write .*file.*; choose another --run$"):
        RunDirectory.open(tmp_path / below, job_name="digits", resume=False)


def test_a_place_that_may_not_be_written_is_one_sentence() -> None:
    with pytest.raises(RunError, match=r"^cannot write /proc/run"):
        RunDirectory.open(Path("/proc/run"), job_name="digits", resume=False)


def test_what_is_no_run_cannot_be_read_as_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run at"):
        existing_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run directory"):
        existing_run(tmp_path)


def test_the_swarm_of_a_run_that_never_trained_is_used_again(tmp_path: Path) -> None:
    for name in ("lock", "store.sqlite", "store.sqlite-wal", "store.sqlite-shm"):
        (tmp_path / name).touch()
    (tmp_path / "identity").mkdir()
    for _ in range(2):
        check_run(tmp_path, job_name="digits", resume=False)
        with RunDirectory.open(tmp_path, job_name="digits", resume=False) as run:
            for path in (run.events_path, run.summary_path):
                path.write_text("{}")
            run.metrics_path.touch()


@pytest.mark.parametrize("trained", ["metrics.jsonl", "checkpoints/0000000010/checkpoint.json"])
def test_a_served_run_that_has_trained_is_refused_without_resume(tmp_path: Path, trained: str) -> None:
    (tmp_path / "identity").mkdir()
    (tmp_path / "events.jsonl").touch()
    (tmp_path / trained).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trained).write_text("{}")
    with pytest.raises(RunError, match="already holds a run; continue it with --resume"):
        RunDirectory.open(tmp_path, job_name="digits", resume=False)


def test_a_run_is_for_its_owner_alone_and_a_folder_that_is_shared_stays_so_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o000)
    try:
        monkeypatch.chdir(tmp_path)
        for path in (None, tmp_path / "deep" / "run"):
            with RunDirectory.open(path, job_name="digits", resume=False) as run:
                assert stat.S_IMODE(run.path.stat().st_mode) == 0o700 and run.sharing_warning() == ""
        shared = tmp_path / "shared"
        shared.mkdir(mode=0o750)
        with RunDirectory.open(shared, job_name="digits", resume=False) as run:
            assert stat.S_IMODE(shared.stat().st_mode) == 0o750
            assert str(shared) in run.sharing_warning() and "0750" in run.sharing_warning()
            assert f"`chmod 700 {shared}`" in run.sharing_warning()
    finally:
        os.umask(before)
