"""`ravnest status` tells how a run stands; `ravnest export` hands the model over."""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ravnest.cli import export, status
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.errors import RunError
from ravnest.graph.weights import stream_tensors
from ravnest.monitor.events import EventLog
from ravnest.monitor.run_directory import RunDirectory, RunPaths
from ravnest.monitor.summary import (
    AveragingSummary,
    ClusterSummary,
    LinkSummary,
    MicrobatchCounts,
    SavedState,
    StageSummary,
    Staleness,
    StateSummary,
    Status,
    Summary,
)


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    status.add_parser(subparsers)
    export.add_parser(subparsers)
    args = parser.parse_args(words)
    code: int = args.run(args)
    return code


def a_summary(state: Status = "finished") -> Summary:
    stage = StageSummary(
        provider="p1",
        stage=0,
        role="root",
        device="cpu",
        parameters=73_856,
        peak_memory_bytes=301 << 20,
        busy_fraction=0.81,
        updates=225,
        staleness=Staleness(mean=1.9, p95=3.0, max=3),
    )
    cluster = ClusterSummary(id=0, samples=14370, samples_per_second=1245.0, stages=(stage,))
    return Summary(
        status=state,
        reason="all epochs done",
        samples=14370,
        epochs=10,
        seconds=16.0,
        samples_per_second=1245.0,
        eval={"accuracy": 0.9835},
        clusters=(cluster,),
        ledger=MicrobatchCounts(fed=225, completed=225),
        updates=225,
    )


def save(run: RunDirectory, updates: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        tensors = {
            "param:embed.weight": torch.full((2, 2), float(updates)),
            "buffer:mask": torch.ones(2),
            "optim:embed.weight:step": torch.tensor(1.0),
        }
        for chunk in stream_tensors(tensors):
            yield chunk

    pending = CheckpointStore(run.checkpoints_path, keep=5).begin(updates)
    asyncio.run(pending.write_part(0, chunks()))
    pending.commit(
        updates=updates,
        samples=updates * 64,
        epoch=0,
        position=updates,
        ledger={},
        state={"aliases": {"head.weight": "embed.weight"}, "non_persistent": ["mask"]},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.open(tmp_path / "run", job_name="digits", resume=False)
    log = EventLog(run.events_path)
    for number in range(12):
        log.emit("checkpoint", f"saved after {number} updates")
    log.close()
    save(run, 10)
    save(run, 20)
    save_file({"table": torch.arange(3)}, run.static_path)
    run.close()
    return run


def test_several_clusters_are_told_with_what_they_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.open(tmp_path / "run", job_name="job", resume=False) as run:
        one = a_summary()
        other = replace(one.clusters[0], id=1, samples=5000, samples_per_second=400.0)
        averaged = AveragingSummary(rounds=7, rings=2, seconds_mean=0.5, bytes=1 << 20, skipped=1)
        replace(one, clusters=(one.clusters[0], other), averaging=averaged).write(run)
        with closing(EventLog(run.events_path)) as events:
            events.emit("round", "round 7: 2 rings of 2 rings averaged by 2 clusters in 0.51 s")
            events.emit("round_skipped", "round 8: nothing was averaged")
            events.emit("checkpoint", "checkpoint 9 is complete")
    assert call("status", str(run.path)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "clusters 14,370 samples at 1,245/s in 0, 5,000 samples at 400/s in 1" in told
    assert "averaging 7 rounds of 2 rings, 0.5 s each, 1 MiB sent, 1 skipped" in told
    assert "last round round 8: nothing was averaged" in told
    assert "0 0 root p1" in told and "1 0 root p1" in told


def test_status_shows_results_stages_and_the_last_events(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    a_summary().write(run)
    assert call("status", str(run.path)) == 0
    text = capsys.readouterr().out
    for expected in (
        "finished",
        "accuracy 0.9835",
        "1,245 samples/s",
        "0 root",
        "p1",
        "81%",
        "1.9 max 3",
        "301 MiB",
        "fed 225",
        "saved after 11 updates",
    ):
        assert expected in text, expected
    assert "saved after 3 updates" not in text


def test_status_as_json_is_the_summary_and_more(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    a_summary().write(run)
    assert call("status", str(run.path), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "finished" and record["eval"] == {"accuracy": 0.9835}
    assert record["clusters"][0]["stages"][0]["provider"] == "p1"
    assert record["events"][-1]["reason"] == "saved after 11 updates" and record["process"] is None


def test_a_running_run_whose_process_is_gone_is_called_interrupted(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    a_summary("running").write(run)
    call("status", str(run.path))
    assert "interrupted" in capsys.readouterr().out
    with RunDirectory.open(run.path, job_name="digits", resume=True):
        call("status", str(run.path))
    text = capsys.readouterr().out
    assert "running" in text and "interrupted" not in text


def test_a_run_without_a_summary_still_has_a_status(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    call("status", str(run.path))
    assert "it ended before training started" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["export", "--out", "model.safetensors"]])
def test_what_is_no_run_is_one_sentence(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        call(*command, str(tmp_path))
    with pytest.raises(RunError, match="there is no run at"):
        call(*command, str(tmp_path / "nowhere"))


def test_status_does_not_wait_for_torch(run: RunDirectory) -> None:
    a_summary().write(run)
    script = (
        "import sys, argparse; from pathlib import Path; from ravnest.cli import status;"
        "status.run(argparse.Namespace(path=Path(sys.argv[1]), json=False));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(run.path)], check=True, stdout=subprocess.DEVNULL)


def test_invites_are_made_and_members_thrown_out_without_waiting_for_torch() -> None:
    script = "import sys, ravnest.coordinator.access.admission; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_export_writes_the_newest_checkpoint_under_the_users_names(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert call("export", str(run.path), "--out", str(out)) == 0
    tensors = load_file(out)
    assert tensors.keys() == {"embed.weight", "head.weight", "table"}
    assert torch.equal(tensors["embed.weight"], torch.full((2, 2), 20.0))
    assert torch.equal(tensors["head.weight"], tensors["embed.weight"])
    assert "3 tensors" in capsys.readouterr().out


def test_export_says_how_much_further_the_run_is(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = time.time()
    state = StateSummary(replica=SavedState(updates=240, at=at - 20.0))
    replace(a_summary("running"), updates=250, state=state).write(run)
    # The process of this run is gone.
    assert call("export", str(run.path), "--out", str(tmp_path / "model.safetensors")) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("the run had come 230 updates further; this checkpoint was ")
    assert "; the providers hold the state after 240 updates, 20 s old: continue the run with --resume" in told


def test_export_can_take_an_older_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    call("export", str(run.path), "--out", str(out), "--checkpoint", "10")
    assert torch.equal(load_file(out)["embed.weight"], torch.full((2, 2), 10.0))
    with pytest.raises(RunError, match="there are: 20, 10"):
        call("export", str(run.path), "--out", str(tmp_path / "other"), "--checkpoint", "15")


def test_export_does_not_overwrite_unless_told(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    with pytest.raises(RunError, match="already exists; choose another --out or overwrite it with --force"):
        call("export", str(run.path), "--out", str(out))
    assert out.read_text() == "precious"
    call("export", str(run.path), "--out", str(out), "--force")
    assert "embed.weight" in load_file(out)
    with pytest.raises(RunError, match="is a folder"):
        call("export", str(run.path), "--out", str(tmp_path), "--force")


def test_export_passes_over_a_damaged_checkpoint_and_says_so(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints_path / "0000000020" / "part-0.safetensors").write_bytes(b"rubbish")
    out = tmp_path / "model.safetensors"
    call("export", str(run.path), "--out", str(out))
    assert torch.equal(load_file(out)["embed.weight"], torch.full((2, 2), 10.0))
    assert "skipped checkpoint 20: " in capsys.readouterr().err
    (run.checkpoints_path / "0000000010" / "checkpoint.json").unlink()
    with pytest.raises(RunError, match="no intact checkpoint"):
        call("export", str(run.path), "--out", str(tmp_path / "none"))


def test_export_into_a_folder_that_is_not_there_is_one_sentence(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*nowhere/model.safetensors"):
        call("export", str(run.path), "--out", str(tmp_path / "nowhere" / "model.safetensors"))


def test_status_shows_the_link_of_looked_up_rows_next_to_the_one_between_the_same_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [stage] = a_summary().clusters[0].stages
    forward, rows = LinkSummary(to="p2", route="direct"), LinkSummary(to="p2", route="relayed", codec="int8")
    root = replace(stage, links=(rows, forward))
    leaf = replace(
        stage,
        provider="p2",
        stage=1,
        role="leaf",
        links=(LinkSummary(to="p1", route="direct"), LinkSummary(to="p1", route="relayed", codec="int8")),
    )
    summary = replace(a_summary(), clusters=(replace(a_summary().clusters[0], stages=(root, leaf)),))
    paths = RunPaths(tmp_path / "run")
    status.print_state(paths, summary, None, [], [], sys.stdout)
    links = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("link")]
    assert links == ["p1 to p2: direct", "p2 to p1 (looked-up rows): relayed, int8"]
