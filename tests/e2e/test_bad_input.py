"""Every mistake a user can make is one sentence that names the thing and the fix; what was saved before stays.

What is about the job rather than about processes goes through a shared swarm, which must be usable afterwards.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from ravnest import CaptureError, JobError, PlanError, RavnestError, RunError, TrainingError
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.jobfile import JobFileFailed, load_job
from ravnest.monitor.events import read_events
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import Summary
from tests.e2e.jobs import Batch, Net, a_job, a_job_file, batches, every_updates, samples


def refused(error: RavnestError, *says: str) -> None:
    """One sentence with all of `says` in it."""
    text = str(error)
    assert error.exit_code == 2
    assert "\n" not in text and "Traceback" not in text, text
    for words in says:
        assert words in text, text


def the_swarm_still_trains(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    result = swarm.train(a_job(batches([8] * 3)), providers=2, run=tmp_path / "afterwards", display=False)
    assert result.summary.status == "finished"
    assert result.summary.ledger.completed == 3


def failed(swarm: EmbeddedSwarm, run: Path, job: Any, kind: type[RavnestError], **options: Any) -> RavnestError:
    """The error of a run that fails; its summary says the same."""
    options.setdefault("providers", 2)
    with pytest.raises(kind) as raised:
        swarm.train(job, run=run, display=False, **options)
    summary = Summary.read(RunPaths(run).summary_path)
    assert (summary.status, summary.reason) == ("failed", str(raised.value))
    told = [event["reason"] for event in read_events(RunPaths(run).events_path) if event["kind"] == "failed"]
    assert told == [str(raised.value)]
    return raised.value


def test_a_loss_that_is_no_scalar(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job(loss=lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"))
    error = failed(swarm, tmp_path / "run", job, JobError)
    refused(error, "loss must return one number", "end it with .mean()")
    the_swarm_still_trains(swarm, tmp_path)


def test_a_model_that_decides_by_its_data_is_refused_with_the_line(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    class Deciding(Net):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            if features.sum() > 0:
                features = features * 2
            return self.layers(features)

    error = failed(swarm, tmp_path / "run", a_job(model=Deciding()), CaptureError)
    refused(error, "test_bad_input.py")
    line = traceback.extract_stack()[-1].lineno
    named = re.search(r"test_bad_input\.py:(\d+)", str(error))
    assert named is not None and line is not None and line - 10 < int(named[1]) < line


def test_a_model_that_does_not_take_the_data(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job([(torch.randn(8, 5), torch.zeros(8, dtype=torch.long))] * 3)
    refused(failed(swarm, tmp_path / "run", job, CaptureError), "mat1 and mat2")


def test_data_that_changes_its_shape_is_named_by_batch(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job([*batches([8] * 4), (torch.randn(8, 7), torch.zeros(8, dtype=torch.long)), *batches([8])])
    refused(
        failed(swarm, tmp_path / "run", job, JobError),
        "train_data, batch 5 of epoch 1",
        "has shape 8x7, but the model was captured for anyx6",
        "pad or crop",
    )
    the_swarm_still_trains(swarm, tmp_path)


def test_data_that_changes_its_type_is_named_by_batch(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    odd = (torch.randn(8, 6).double(), torch.zeros(8, dtype=torch.long))
    error = failed(swarm, tmp_path / "run", a_job([*batches([8] * 3), odd]), JobError)
    refused(error, "train_data, batch 4 of epoch 1", "is float64, but the first batch had float32")


def test_evaluation_data_of_another_shape_is_named(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = a_job(eval_data=[(torch.randn(8, 7), torch.zeros(8, dtype=torch.long))])
    refused(failed(swarm, tmp_path / "run", job, JobError), "eval_data, batch 1", "8x7")
    the_swarm_still_trains(swarm, tmp_path)


@pytest.mark.parametrize("data", [[], lambda: iter(())], ids=["list", "function"])
def test_empty_data(swarm: EmbeddedSwarm, tmp_path: Path, data: Any) -> None:
    refused(failed(swarm, tmp_path / "run", a_job(data), JobError), "train_data is empty", "check the dataset")


def test_data_that_is_used_up_before_the_second_epoch(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    passes = [batches([8] * 2), batches([8] * 2), []]
    error = failed(swarm, tmp_path / "run", a_job(lambda: passes.pop(0), epochs=2), JobError)
    refused(error, "train_data yields nothing in epoch 2", "pass a function that returns a fresh iterator")


def test_batches_that_are_no_pairs(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    error = failed(swarm, tmp_path / "run", a_job([torch.randn(8, 6)] * 3), JobError)
    refused(error, "must yield (inputs, targets)", "yield a Tensor")


def test_a_loss_that_is_not_finite_names_the_microbatch_and_keeps_the_checkpoint(
    swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    good, run = batches([8] * 8), tmp_path / "run"
    poisoned = (torch.full((8, 6), float("nan")), torch.zeros(8, dtype=torch.long))
    job = a_job([*good[:5], poisoned, *good[6:]], checkpoint=every_updates(2))
    error = failed(swarm, run, job, TrainingError)
    refused(error, "the loss of microbatch 5 is nan", "the input inputs holds NaN: clean sample 0, 1, 2, 3, 4, …")
    refused(error, "the last good checkpoint is kept", "--resume")
    assert "learning rate" not in str(error)
    summary = Summary.read(run / "summary.json")
    assert summary.ledger.completed == 5
    the_swarm_still_trains(swarm, tmp_path)
    # Nothing of the bad microbatch was applied: with the data mended, the run goes on as if nothing had happened.
    whole = swarm.train(a_job(good), providers=2, run=tmp_path / "whole", display=False)
    mended = swarm.train(a_job(good), providers=2, run=run, resume=True, display=False)
    assert mended.summary.ledger.completed == whole.summary.ledger.completed == 8
    assert same_models(whole.model, mended.model)


def test_more_providers_than_the_model_has_places_to_cut(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    error = failed(swarm, tmp_path / "run", a_job(), PlanError, providers=4)
    refused(error, "at most 3 stages, not 4", "--providers 3 or fewer")
    the_swarm_still_trains(swarm, tmp_path)


def test_no_providers_at_all() -> None:
    with pytest.raises(PlanError) as raised:
        a_job().train(providers=0)
    refused(raised.value, "providers is 0", "at least 1")


class Breaking(Dataset[Batch]):
    """Fails at one sample."""

    def __init__(self, at: int) -> None:
        self.features, self.labels = samples(64)
        self.at = at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise LookupError(f"sample {index} is missing")
        return self.features[index], self.labels[index]


def a_failing_generator() -> Iterator[Batch]:
    yield from batches([8] * 4)
    raise LookupError("the tape is torn")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_data_is_told_in_the_users_own_traceback(
    swarm: EmbeddedSwarm, tmp_path: Path, workers: int
) -> None:
    job = a_job(DataLoader(Breaking(at=40), batch_size=8, num_workers=workers), checkpoint=every_updates(2))
    error = failed(swarm, tmp_path / "run", job, JobFileFailed)
    refused(error, "train_data, batch 6 of epoch 1 failed with LookupError: sample 40 is missing")
    assert isinstance(error, JobFileFailed)
    assert 'raise LookupError(f"sample {index} is missing")' in error.user_traceback
    assert error.user_traceback.endswith("LookupError: sample 40 is missing\n")
    files = re.findall(r'File "([^"]+)"', error.user_traceback)
    assert files and all(name == __file__ for name in files), error.user_traceback
    # What had been saved by then can be resumed, with the data mended.
    resumed = swarm.train(a_job(batches()), providers=2, run=tmp_path / "run", resume=True, display=False)
    assert resumed.summary.ledger.completed == 8
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert "resumed after 5 updates" in [event["reason"] for event in events if event["kind"] == "started"]


def test_an_exception_of_a_generator_is_the_users_own(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    error = failed(swarm, tmp_path / "run", a_job(a_failing_generator), JobFileFailed)
    refused(error, "train_data, batch 5 of epoch 1 failed with LookupError: the tape is torn")


def test_an_exception_of_the_evaluation_data_is_the_users_own(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    error = failed(swarm, tmp_path / "run", a_job(eval_data=a_failing_generator), JobFileFailed)
    refused(error, "eval_data, batch 5 failed with LookupError: the tape is torn")
    the_swarm_still_trains(swarm, tmp_path)


def a_full_disk(path: Path) -> None:
    path.write_text("a file where the run directory should be")


def a_foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").touch()


@pytest.mark.parametrize(
    ("occupy", "says"),
    [(a_full_disk, "is not a folder"), (a_foreign_folder, "holds other files but no run")],
    ids=["a file", "other files"],
)
def test_a_run_directory_that_cannot_be_used(
    swarm: EmbeddedSwarm, tmp_path: Path, occupy: Callable[[Path], None], says: str
) -> None:
    run = tmp_path / "run"
    occupy(run)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(RunError) as raised:
        swarm.train(a_job(), providers=2, run=run, display=False)
    refused(raised.value, "--run")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    # The same is told before any process is started.
    with pytest.raises(RunError, match=says):
        a_job().train(run=run)
    the_swarm_still_trains(swarm, tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "Net"}, "model is the class Net: pass an instance"),
        ({"loss": "3"}, "loss is 3: pass a function"),
        ({"optimizer": "torch.optim.SGD(Net().parameters(), lr=0.1)"}, "optimizer is an instance"),
        ({"epochs": "'ten'"}, "epochs is 'ten': give a whole number"),
        ({"train_data": "5"}, "train_data is 5: pass an iterable"),
    ],
)
def test_wrong_types_name_the_field_and_the_line(tmp_path: Path, fields: dict[str, str], says: str) -> None:
    path = a_job_file(tmp_path, **fields)
    with pytest.raises(JobError) as raised:
        load_job(str(path))
    refused(raised.value, says, "job.py:")


def same_models(first: Path | None, second: Path | None) -> bool:
    from safetensors.torch import load_file

    assert first is not None and second is not None
    one, other = load_file(first), load_file(second)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
