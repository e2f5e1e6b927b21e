"""A run that is interrupted and resumed ends with the very parameters of one that was not: weights, optimizer state,
schedule, place in the data and counters all go on."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ravnest import Job, JobError, Pipeline, RunError
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from ravnest.monitor.metrics import read_metrics
from tests.e2e.jobs import Net, a_job, a_net, batches, every_updates, samples


class InterruptedData(Exception):  # noqa: N818 (it plays an interrupt)
    """Raised by data that breaks off, as a power cut would."""


class BreakingOff:
    """Data that breaks off after so many batches in all; what the model is captured on does not count."""

    def __init__(self, data: Any, after: int) -> None:
        self.data, self.left = data, after + 2
        self.generator = getattr(data, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(80)), batch_size=8, shuffle=True, **options)


def generated() -> "DataLoader[Any]":
    return loader(generator=torch.Generator().manual_seed(7))


class Noisy(Net):
    """With dropout and batch norm: what is random or counted must go on as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(16))
        self.layers.insert(3, nn.Dropout(0.3))


def a_noisy_net() -> Noisy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Noisy()


def difference(first: Path | None, second: Path | None) -> float:
    assert first is not None and second is not None
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a shuffling DataLoader": (loader, {}),
    "a DataLoader with workers": (partial(loader, num_workers=2), {}),
    "a DataLoader with its own generator": (generated, {}),
    "a list": (lambda: batches([8] * 9 + [3]), {}),
    "accumulate=2": (loader, {"pipeline": Pipeline(in_flight=1, accumulate=2)}),
    "a schedule": (loader, {"schedule": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)}),
    "momentum and a cycle": (
        loader,
        {
            "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            "schedule": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_ends_as_one_that_was_not(swarm: EmbeddedSwarm, tmp_path: Path, name: str) -> None:
    make_data, settings = CASES[name]

    def job(data: Any) -> Job:
        return a_job(data, model=a_noisy_net(), epochs=2, eval_data=batches([8, 5], seed=1), **settings)

    whole = swarm.train(job(make_data()), providers=2, run=tmp_path / "whole", display=False)
    run = tmp_path / "run"
    first = swarm.train(job(BreakingOff(make_data(), after=14)), providers=2, run=run, display=False)
    assert first.summary.status == "stopped"
    # By another number of providers: the model is cut elsewhere, its state is the same.
    second = swarm.train(job(make_data()), providers=3, run=run, resume=True, display=False)
    assert second.summary.status == "finished"
    assert first.summary.updates == 14 // job([]).pipeline.accumulate
    for field in ("samples", "updates", "epochs", "ledger"):
        assert getattr(second.summary, field) == getattr(whole.summary, field), field
    assert second.summary.eval == pytest.approx(whole.summary.eval, rel=1e-5)
    assert difference(whole.model, second.model) <= 1e-6
    curve = [(m["samples"], m["updates"]) for m in read_metrics(run / "metrics.jsonl") if m["kind"] == "train"]
    assert curve == [
        (m["samples"], m["updates"]) for m in read_metrics(tmp_path / "whole/metrics.jsonl") if m["kind"] == "train"
    ]


def test_gradients_summed_but_not_applied_are_computed_again(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    # Interrupted in the middle of an update, after 5 of 2 + 2 + 2 microbatches; in the second epoch, besides.
    settings: dict[str, Any] = {"pipeline": Pipeline(in_flight=1, accumulate=2), "epochs": 3}
    data = batches([8] * 3)
    whole = swarm.train(a_job(data, **settings), providers=2, run=tmp_path / "whole", display=False)
    run = tmp_path / "run"
    first = swarm.train(a_job(BreakingOff(data, after=5), **settings), providers=2, run=run, display=False)
    assert (first.summary.ledger.completed, first.summary.updates) == (5, 2)
    second = swarm.train(a_job(data, **settings), providers=2, run=run, resume=True, display=False)
    assert (second.summary.ledger.completed, second.summary.updates) == (9, 5)
    assert difference(whole.model, second.model) <= 1e-6


def test_a_crash_goes_on_from_the_checkpoint_before_it(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    def crash() -> Iterator[Any]:
        yield from islice(batches([8] * 10), 7)
        raise InterruptedData

    whole = swarm.train(a_job(batches([8] * 10)), providers=2, run=tmp_path / "whole", display=False)
    run = tmp_path / "run"
    with pytest.raises(JobError):
        swarm.train(a_job(crash, checkpoint=every_updates(3)), providers=2, run=run, display=False)
    # As a crash of the machine would leave it: without what was saved in good order at the end.
    # Which one came before depends on how long the disk takes: one checkpoint is under way at a time.
    before, newest = sorted((run / "checkpoints").iterdir())[-2:]
    assert newest.name.endswith("7")
    part = newest / "part-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    resumed = swarm.train(a_job(batches([8] * 10)), providers=2, run=run, resume=True, display=False)
    assert difference(whole.model, resumed.model) <= 1e-6
    events = read_events(run / "events.jsonl")
    [damaged] = [event for event in events if event["kind"] == "checkpoint_damaged"]
    assert damaged["checkpoint"] == newest.name and "part-0.safetensors is damaged" in damaged["reason"]
    assert f"resumed after {int(before.name)} updates" in [event["reason"] for event in events]


def test_a_run_with_damaged_checkpoints_only_is_refused(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    swarm.train(a_job(), providers=1, run=run, display=False)
    for manifest in run.glob("checkpoints/*/checkpoint.json"):
        manifest.write_text("{}")
    with pytest.raises(RunError, match="has no good checkpoint to resume from"):
        swarm.train(a_job(), providers=1, run=run, resume=True, display=False)


@pytest.mark.parametrize("limits", [{"epochs": 1}, {"epochs": 5, "max_updates": 4}], ids=["epochs", "max_updates"])
def test_a_finished_run_is_only_evaluated_again(swarm: EmbeddedSwarm, tmp_path: Path, limits: dict[str, int]) -> None:
    run, job = tmp_path / "run", a_job(eval_data=batches(), **limits)
    first = swarm.train(job, providers=2, run=run, display=False)
    assert first.model is not None
    before = load_file(first.model)
    again = swarm.train(job, providers=2, run=run, resume=True, display=False)
    assert again.summary.status == "finished"
    assert again.summary.reason == "all of it had been done before; evaluated again"
    assert again.summary.eval == pytest.approx(first.summary.eval)
    assert again.summary.samples == first.summary.samples
    assert all(torch.equal(before[key], value) for key, value in load_file(run / "model.safetensors").items())


@pytest.mark.parametrize("longer", [{"epochs": 3}, {"epochs": 1, "max_updates": 6}], ids=["epochs", "max_updates"])
def test_a_finished_run_goes_on_when_more_is_asked_for(
    swarm: EmbeddedSwarm, tmp_path: Path, longer: dict[str, int]
) -> None:
    shorter = {"epochs": 1, **({"max_updates": 4} if "max_updates" in longer else {})}
    whole = swarm.train(a_job(**longer), providers=2, run=tmp_path / "whole", display=False)
    run = tmp_path / "run"
    swarm.train(a_job(**shorter), providers=2, run=run, display=False)
    more = swarm.train(a_job(**longer), providers=2, run=run, resume=True, display=False)
    assert more.summary.updates == whole.summary.updates
    assert more.summary.ledger == whole.summary.ledger
    assert difference(whole.model, more.model) <= 1e-6


def test_a_learning_rate_given_at_the_resume_is_used(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    def job(rate: float, epochs: int) -> Job:
        return a_job(optimizer=partial(torch.optim.SGD, lr=rate), epochs=epochs)

    run = tmp_path / "run"
    first = swarm.train(job(0.1, 1), providers=2, run=run, display=False)
    assert first.model is not None
    before = load_file(first.model)
    second = swarm.train(job(0.0, 2), providers=2, run=run, resume=True, display=False)
    assert second.summary.updates == 16
    assert second.model is not None
    assert all(torch.equal(before[key], value) for key, value in load_file(second.model).items())


def test_another_optimizer_or_another_model_is_refused(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    swarm.train(a_job(), providers=2, run=run, display=False)
    with pytest.raises(RunError, match="was trained with AdamW and its state does not fit SGD"):
        swarm.train(a_job(optimizer=partial(torch.optim.SGD, lr=0.1)), providers=2, run=run, resume=True, display=False)
    wider = a_net()
    wider.layers[0] = nn.Linear(6, 16, bias=False)
    wider.layers[2] = nn.Linear(16, 24)
    wider.layers[4] = nn.Linear(24, 3)
    with pytest.raises(RunError, match="the checkpoint does not fit the model"):
        swarm.train(a_job(model=wider, epochs=2), providers=2, run=run, resume=True, display=False)
    # Nothing was lost by the attempts.
    assert swarm.train(a_job(epochs=2), providers=2, run=run, resume=True, display=False).summary.updates == 16


def test_less_data_than_had_been_used_is_refused(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    swarm.train(a_job(BreakingOff(batches([8] * 9), after=7)), providers=2, run=run, display=False)
    with pytest.raises(JobError, match="train_data has only 4 batches in epoch 1, the run to resume had used 7"):
        swarm.train(a_job(batches([8] * 4)), providers=2, run=run, resume=True, display=False)
