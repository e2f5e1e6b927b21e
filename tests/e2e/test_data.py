"""Any iterable of (inputs, targets) is data, every batch of it is used once, and metrics are means over samples."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ravnest import Job
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import BATCH, Batch, Net, a_job, a_net, accuracy, batches, samples


def plain(job: Job, data: list[Batch]) -> nn.Module:
    """What a plain loop over `data` trains."""
    model = a_net()
    optimizer = job.optimizer(model.parameters())
    for inputs, targets in data:
        loss = job.loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def trained_on(swarm: EmbeddedSwarm, run: Path, data: Any, expected: list[Batch], **changes: Any) -> None:
    """The run uses every batch of the data, each once, in order."""
    job = a_job(data, **changes)
    result = swarm.train(job, providers=2, run=run, display=False)
    count = len(expected)
    assert result.summary.ledger.fed == result.summary.ledger.completed == count
    assert result.summary.samples == sum(len(targets) for _, targets in expected)
    assert result.model is not None
    found = load_file(result.model)
    for name, value in plain(job, expected).state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


def uneven() -> list[Batch]:
    """A last batch that is smaller, and one of a single sample."""
    return batches([8, 8, 1, 8, 3])


def a_generator() -> Iterator[Batch]:
    yield from uneven()


class Stream(IterableDataset[Batch]):
    """Without a length, as a stream has none."""

    def __iter__(self) -> Iterator[Batch]:
        yield from uneven()


def of_samples(**options: Any) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(*samples(28)), batch_size=8, **options)


DATA = {
    "a list": (uneven, uneven),
    "a generator function": (lambda: a_generator, uneven),
    "an iterator": (lambda: iter(uneven()), uneven),
    "a stream in a DataLoader": (lambda: DataLoader(Stream(), batch_size=None), uneven),
    "a DataLoader": (of_samples, lambda: batches([8, 8, 8, 4])),
    "a DataLoader with workers": (lambda: of_samples(num_workers=2), lambda: batches([8, 8, 8, 4])),
    "a DataLoader that keeps its workers": (
        lambda: of_samples(num_workers=1, persistent_workers=True),
        lambda: batches([8, 8, 8, 4]),
    ),
    "lists instead of tuples": (lambda: [[x, y] for x, y in uneven()], uneven),
    "arrays": (lambda: [(x.numpy(), y.numpy()) for x, y in uneven()], uneven),
    "batches of one sample": (lambda: batches([1] * 5), lambda: batches([1] * 5)),
    "a single batch": (lambda: batches([8]), lambda: batches([8])),
}


@pytest.mark.parametrize("name", DATA)
def test_every_batch_is_used_once_and_in_order(swarm: EmbeddedSwarm, tmp_path: Path, name: str) -> None:
    make, expected = DATA[name]
    trained_on(swarm, tmp_path / "run", make(), expected())


class ByName(Net):
    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(left + right)


def test_inputs_by_name(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    data = [({"left": x, "right": x * 2}, y) for x, y in uneven()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ByName()
    # Whatever the order of the keys is.
    mixed = [(dict(reversed(x.items())) if i % 2 else x, y) for i, (x, y) in enumerate(data)]
    result = swarm.train(a_job(mixed, model=model), providers=2, run=tmp_path / "run", display=False)
    same = swarm.train(
        a_job([(x * 3, y) for x, y in uneven()], model=a_net()), providers=2, run=tmp_path / "same", display=False
    )
    assert result.model is not None and same.model is not None
    found, expected = load_file(result.model), load_file(same.model)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_a_hugging_face_dataset(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features, labels = samples(28)
    dataset = datasets.Dataset.from_dict({"x": features.tolist(), "y": labels.tolist()}).with_format("torch")
    data = DataLoader(dataset, batch_size=8, collate_fn=lambda rows: (stacked(rows, "x"), stacked(rows, "y")))
    trained_on(swarm, tmp_path / "run", data, batches([8, 8, 8, 4]))


def stacked(rows: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    return torch.stack([row[key] for row in rows])


def test_an_endless_stream_ends_with_max_updates(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    def endless() -> Iterator[Batch]:
        return itertools.cycle(batches([8, 8, 8]))

    trained_on(swarm, tmp_path / "run", endless, batches([8, 8, 8]) * 2 + batches([8, 8, 8])[:1], max_updates=7)


class Remembering(Dataset[Batch]):
    """Knows its epoch, as a distributed sampler or a streaming dataset does."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        features, labels = samples(16)
        return features[index], labels[index]


def test_data_that_wants_to_know_its_epoch_is_told(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    dataset = Remembering()
    swarm.train(a_job(DataLoader(dataset, batch_size=8), epochs=3), providers=1, run=tmp_path / "run", display=False)
    assert dataset.told == [0, 0, 1, 2]  # The first time for the model to be captured on it.


def test_a_generator_of_the_users_own_shuffles_as_in_a_plain_loop(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    def loader() -> "DataLoader[Any]":
        return of_samples(shuffle=True, generator=torch.Generator().manual_seed(5))

    unshuffled = loader()
    expected = [(x, y) for _ in range(3) for x, y in unshuffled]
    trained_on(swarm, tmp_path / "run", loader(), expected, epochs=3)


def test_an_evaluation_is_the_mean_over_samples(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    held_out = batches([8, 8, 1, 5], seed=9)
    job = a_job(eval_data=held_out, metrics={"accuracy": accuracy})
    result = swarm.train(job, providers=3, run=tmp_path / "run", display=False)
    model = a_net()
    assert result.model is not None
    model.load_state_dict(load_file(result.model))
    features, labels = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    with torch.no_grad():
        logits = model(features)
    assert result.summary.eval["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert result.summary.eval["accuracy"] == pytest.approx(float(accuracy(logits, labels)), rel=1e-6)


def test_evaluations_come_as_often_as_asked_and_after_the_last_epoch(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    from ravnest.monitor.metrics import read_metrics

    job = a_job(batches([8, 8]), eval_data=batches([8]), epochs=5, eval_every=2)
    result = swarm.train(job, providers=1, run=tmp_path / "run", display=False)
    curve = [metric for metric in read_metrics(result.run / "metrics.jsonl") if metric["kind"] == "eval"]
    assert [metric["updates"] for metric in curve] == [4, 8, 10]
    assert result.summary.eval["loss"] == pytest.approx(curve[-1]["loss"])


def test_evaluation_data_without_a_batch_is_no_evaluation(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    result = swarm.train(a_job(eval_data=[]), providers=1, run=tmp_path / "run", display=False)
    assert result.summary.status == "finished" and result.summary.eval == {}


def test_several_in_flight_account_for_every_microbatch(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    from ravnest import Pipeline

    job = a_job(batches([BATCH] * 40), epochs=3, pipeline=Pipeline(in_flight=5), eval_data=batches([8] * 12))
    summary = swarm.train(job, providers=3, run=tmp_path / "run", display=False).summary
    assert (summary.ledger.fed, summary.ledger.completed, summary.ledger.lost) == (120, 120, 0)
    stages = summary.clusters[0].stages
    assert [stage.updates for stage in stages] == [120, 120, 120]
    assert 0 < stages[0].staleness.max <= 4
    assert stages[-1].staleness.max == 0
