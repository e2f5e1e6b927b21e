"""`ravnest plan` as a user meets it: a process of its own, its two ways to tell, and its ends."""

import json
import signal
import textwrap
from pathlib import Path

import pytest

from tests.e2e.command import Running, ravnest

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits" / "job.py"
NODES = ROOT / "examples" / "nodes.toml"

JOB = """
    import functools
    import torch
    import ravnest

    print("the job file prints")
    torch.manual_seed(0)
    job = ravnest.Job(
        model=torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)),
        loss=torch.nn.functional.cross_entropy,
        train_data=[(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))] * 4,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
"""
TWO = '[[node]]\nname = "pc"\ncount = 2\nmemory = "1GB"\nup_mbps = 10\ndown_mbps = 50\nping_ms = 20\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    (tmp_path / "nodes.toml").write_text(TWO)
    return tmp_path


def test_the_example_is_planned_and_shown(tmp_path: Path) -> None:
    done = ravnest("plan", DIGITS, "--nodes", NODES, "--seconds", "1", folder=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
    assert "planning for 12 machines" in done.stderr
    assert done.stdout.startswith("digits: ")
    assert "samples/s predicted with" in done.stdout
    for name in ("gaming-pc", "office-3", "village-pc"):
        assert name in done.stdout, name
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"


def test_json_is_all_there_is_on_stdout_whatever_the_job_prints(folder: Path) -> None:
    done = ravnest("plan", "job.py", "--nodes", "nodes.toml", "--json", folder=folder, warm=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert "the job file prints" in done.stderr
    assert set(plan["providers"]) == {"pc-1", "pc-2"}
    busy = {stage["provider"] for cluster in plan["clusters"] for stage in cluster["stages"]}
    assert busy | set(plan["standbys"]) == set(plan["providers"])
    assert plan["predicted_samples_per_second"] > 0


def test_a_mistake_in_the_file_is_told_with_its_line_before_the_job_is_loaded(folder: Path) -> None:
    (folder / "nodes.toml").write_text(TWO.replace("up_mbps", "up_mbs"))
    done = ravnest("plan", "job.py", "--nodes", "nodes.toml", folder=folder)
    assert done.returncode == 2
    assert done.stderr == 'ravnest: error: nodes.toml:5: "up_mbs" in pc is not known: did you mean up_mbps?\n'


def test_a_file_that_is_not_there_is_told(folder: Path) -> None:
    done = ravnest("plan", "job.py", "--nodes", "nobody.toml", folder=folder)
    assert done.returncode == 2
    assert "cannot read nobody.toml: No such file or directory" in done.stderr


def test_a_model_that_does_not_fit_ends_with_what_would_make_it_fit(folder: Path) -> None:
    (folder / "nodes.toml").write_text(TWO.replace("1GB", "1KB"))
    done = ravnest("plan", "job.py", "--nodes", "nodes.toml", folder=folder, warm=True)
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ravnest: error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("phase", ["loading the job", "capturing the model", "profiling the model"])
def test_ctrl_c_ends_it_at_once_and_cleanly(folder: Path, phase: str) -> None:
    # A job that is being loaded imports torch.
    warm = phase != "loading the job"
    with Running("plan", "job.py", "--nodes", "nodes.toml", folder=folder, warm=warm) as running:
        running.until(phase)
        running.signal(signal.SIGINT, group=True)
        said = running.to_the_end()
    assert running.process.returncode == 130
    assert "Traceback" not in said
    assert said.endswith("ravnest: interrupted\n")
