"""Ctrl-C and SIGTERM end a run in good order, wherever it is: within five seconds, saved, and nothing left behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.command import Running, within
from tests.e2e.jobs import a_job_file

BLOCKING = """
def block(words):
    print(words, file=__import__("sys").stderr, flush=True)
    while True:
        time.sleep(60)


def forever():
    while True:
        yield from batches


def blocking():
    yield from batches
    block("the data blocks")


def blocking_evaluation():
    yield batches[0]
    block("the evaluation blocks")


class Blocking(Net):
    def forward(self, features):
        block("the model blocks")
"""

STOP_SECONDS = 5.0


def summary_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "run/summary.json").read_text())
    return found


def start(folder: Path, warm: bool = True, **fields: str) -> Running:
    a_job_file(folder, before=BLOCKING, **fields)
    return Running("train", "job.py", "--providers", "1", "--run", "run", folder=folder, warm=warm)


def test_ctrl_c_while_the_data_blocks_saves_what_was_learnt(tmp_path: Path) -> None:
    with start(tmp_path, data="blocking") as running:
        running.until("the data blocks")
        with within(STOP_SECONDS, "the stop"):
            running.signal(signal.SIGINT, group=True)
            said = running.to_the_end()
    assert running.process.returncode == 130
    assert "Traceback" not in said
    assert "Stopped after" in said
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["samples"], summary["updates"]) == ("stopped", 64, 8)
    assert summary["reason"] == "interrupted; saved after 8 updates, continue with --resume"
    assert summary["ledger"] == {"fed": 8, "completed": 8, "replayed": 0, "lost": 0, "applied_twice": 0}
    assert "model.safetensors" in os.listdir(tmp_path / "run")


def test_sigterm_while_training_stops_as_cleanly(tmp_path: Path) -> None:
    with start(tmp_path, data="forever") as running:
        running.until("] training")
        with within(STOP_SECONDS, "the stop"):
            running.signal(signal.SIGTERM)
            said = running.to_the_end()
    assert running.process.returncode == 143
    assert "Traceback" not in said
    summary = summary_of(tmp_path)
    assert summary["status"] == "stopped"
    ledger = summary["ledger"]
    assert isinstance(ledger, dict) and ledger["fed"] == ledger["completed"] and ledger["lost"] == 0
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    assert int(checkpoint.name) == summary["updates"]


@pytest.mark.parametrize(
    ("fields", "moment", "status"),
    [
        ({"model": "Blocking()"}, "the model blocks", "stopped"),
        ({"eval_data": "blocking_evaluation"}, "the evaluation blocks", "stopped"),
        ({}, "starting 1 provider", None),
    ],
    ids=["capturing", "evaluating", "starting"],
)
def test_ctrl_c_in_another_phase(tmp_path: Path, fields: dict[str, str], moment: str, status: str | None) -> None:
    # A provider that is starting still imports torch.
    with start(tmp_path, warm=status is not None, **fields) as running:
        running.until(moment)
        with within(STOP_SECONDS, "the stop"):
            running.signal(signal.SIGINT)
            said = running.to_the_end()
    assert running.process.returncode == 130
    assert "Traceback" not in said, said
    if status is None:
        assert said.endswith("ravnest: interrupted\n")
    else:
        assert summary_of(tmp_path)["status"] == status


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    # The first can save nothing in time: the provider is stopped and does not answer.
    with start(tmp_path, data="blocking") as running:
        running.until("the data blocks")
        [provider] = running.providers()
        provider.suspend()
        running.signal(signal.SIGINT)
        running.until("stopping")
        with within(2.0, "the end"):
            running.signal(signal.SIGINT)
            said = running.to_the_end()
    assert running.process.returncode == 130
    assert "Traceback" not in said, said
    assert summary_of(tmp_path)["status"] == "stopped"
    assert "interrupted twice" in str(summary_of(tmp_path)["reason"])
