"""`ravnest train` as a user meets it: mistakes told at once and in one sentence, a run from its start to the model."""

import json
import re
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.command import COMMAND, Running, environment, ravnest, within
from tests.e2e.jobs import a_job_file, a_net


def told(done: "subprocess.CompletedProcess[str]", *says: str) -> str:
    """The one sentence of an error: exit code 2, nothing on stdout, no traceback of ours."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    sentence = done.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ravnest: error: "), done.stderr
    assert "ravnest/" not in done.stderr.replace(str(Path.cwd()), ""), done.stderr
    for words in says:
        assert words in sentence, sentence
    return sentence


def test_a_missing_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "digits.py").touch()
    with within(2, "the answer"):
        done = ravnest("train", "digit.py", folder=tmp_path)
    told(done, "digit.py does not exist", ": digits.py")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "digits.py"]


def test_a_run_directory_in_the_way_is_told_before_anything_starts(tmp_path: Path) -> None:
    a_job_file(tmp_path)
    (tmp_path / "occupied").touch()
    with within(2, "the answer"):
        done = ravnest("train", "job.py", "--run", "occupied/run", folder=tmp_path)
    told(done, "cannot write occupied/run", "is not a folder", "choose another --run")
    assert "Traceback" not in done.stderr


def test_a_file_without_a_job_leaves_no_run_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("jbo = 1\n")
    done = ravnest("train", "other.py", "--providers", "1", folder=tmp_path, warm=True)
    told(done, "other.py has no job: ", "job = ravnest.Job(...)")
    assert not (tmp_path / "runs").exists()


def test_an_exception_in_the_file_is_the_users_own_traceback(tmp_path: Path) -> None:
    path = a_job_file(tmp_path, before="def shape():\n    return [][3]\n\nshape()")
    done = ravnest("train", "job.py", "--providers", "1", folder=tmp_path, warm=True)
    told(done, "job.py failed with IndexError: list index out of range")
    assert done.stderr.count("Traceback (most recent call last)") == 1
    files = re.findall(r'File "([^"]+)"', done.stderr)
    assert files == [str(path), str(path)]


def test_an_unknown_setting_suggests_the_near_one(tmp_path: Path) -> None:
    a_job_file(tmp_path)
    done = ravnest("train", "job.py", "--providers", "1", "--set", "pipeline.inflight=2", folder=tmp_path, warm=True)
    told(done, "--set pipeline.inflight: there is no such setting; did you mean pipeline.in_flight?")


def test_a_run_of_two_clusters_from_its_start_to_the_model(tmp_path: Path) -> None:
    a_job_file(
        tmp_path, eval_data="batches", epochs="2", schedule="partial(torch.optim.lr_scheduler.StepLR, step_size=4)"
    )
    words = ("--providers", "2", "--clusters", "2", "--set", "epochs=3", "--set", "averaging.codec=int8")
    done = ravnest("train", "job.py", *words, "--run", "first", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert [len(cluster["stages"]) for cluster in summary["clusters"]] == [1, 1]
    lines = [re.sub(r"^\[ +[\d.]+ s\] ", "", line) for line in done.stderr.splitlines()]
    assert lines[0] == "starting 2 providers"
    assert "run directory: first" in lines
    for start in ("capturing the model", "training   epoch 1/3", "evaluation   loss", "Finished in", "model: first/"):
        assert any(line.startswith(start) for line in lines), (start, lines)
    assert "\x1b" not in done.stderr
    a_net().load_state_dict(
        {f"layers.{name}": value for name, value in load_file(tmp_path / "first/model.safetensors").items()}
    )
    again = ravnest("train", "job.py", "--providers", "1", "--run", "first", folder=tmp_path)
    told(again, "first already holds a run", "--resume")


def test_status_and_export_of_a_run_that_is_under_way_and_of_one_that_is_over(tmp_path: Path) -> None:
    slow = """
    def slowly():
        for batch in batches:
            yield batch
        (HERE / "waiting").touch()
        while not (HERE / "go").exists():
            time.sleep(0.02)
        yield batches[0]
    """
    settings = "ravnest.Checkpoint(every_seconds=None, every_updates=4)"
    a_job_file(tmp_path, before=slow, data="slowly", checkpoint=settings)
    with Running("train", "job.py", "--providers", "1", "--run", "run", folder=tmp_path, warm=True) as running:
        running.until("training")
        summary = json.loads(status(tmp_path, "--json"))
        assert summary["status"] in ("starting", "running")
        assert summary["process"] == running.process.pid
        assert "running" in status(tmp_path) or "starting" in status(tmp_path)
        (tmp_path / "go").touch()
        running.to_the_end()
        assert running.process.returncode == 0
    summary = json.loads(status(tmp_path, "--json"))
    assert (summary["status"], summary["process"], summary["samples"]) == ("finished", None, 72)
    assert "finished" in status(tmp_path) and "fed 9, completed 9" in status(tmp_path)
    done = ravnest("export", "run", "--out", "out.safetensors", folder=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
    model, exported = load_file(tmp_path / "run/model.safetensors"), load_file(tmp_path / "out.safetensors")
    assert all((model[name] == exported[name]).all() for name in model)


def status(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [*COMMAND, "status", "run", *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
