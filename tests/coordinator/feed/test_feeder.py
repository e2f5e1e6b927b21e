"""The feeder hands out every batch once, in the same order whenever a run is resumed, and waits for nothing it need
not wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ravnest import Job, JobError, Pipeline
from ravnest.coordinator.feed.data_order import epoch_size
from ravnest.coordinator.feed.feeder import EpochEnd, EvalBatch, EvalEnd, Feeder, Item, TrainBatch, first_batches
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.graph.batch import Structure
from ravnest.graph.portable import ValueSpec
from ravnest.jobfile import JobFileFailed
from tests.e2e.jobs import a_job, batches, samples

INPUTS = (
    ValueSpec("inputs", torch.float32, ("batch", 6)),
    ValueSpec("targets", torch.int64, ("batch",)),
)


def fed(job: Job, start: DataPosition = DataPosition(), most: int | None = None, **options: Any) -> list[Item]:  # noqa: B008
    """The items a job's feeder hands out; with `most` it is given up after so many."""
    items: list[Item] = []

    def put(item: Item) -> None:
        items.append(item)
        if len(items) == most:
            raise GivenUpError

    feeder = Feeder(job, Structure.of(batches([8])[0]), INPUTS, put, **options)
    if most is None:
        feeder.run(start)
    else:
        with pytest.raises(GivenUpError):
            feeder.run(start)
    return items


class GivenUpError(Exception):
    pass


def kinds(items: list[Item]) -> str:
    letter = {TrainBatch: "t", EvalBatch: "e", EpochEnd: "|", EvalEnd: "."}
    return "".join(letter[type(item)] for item in items)


def contents(items: list[Item]) -> list[list[float]]:
    return [item.tensors["inputs"].flatten().tolist() for item in items if isinstance(item, TrainBatch)]


def test_epochs_and_evaluations_follow_one_another() -> None:
    job = a_job(batches([8, 8]), eval_data=batches([8]), epochs=3, eval_every=2)
    assert kinds(fed(job)) == "tt|tt|e.tt|e."
    assert kinds(fed(a_job(batches([8, 8]), epochs=2))) == "tt|tt|"


def test_every_batch_says_where_the_run_stands_after_it() -> None:
    items = [item for item in fed(a_job(batches([8, 3]), epochs=2)) if isinstance(item, TrainBatch)]
    assert [item.microbatch for item in items] == [0, 1, 2, 3]
    assert [item.after for item in items] == [
        DataPosition(0, 1, 1, 1, 8),
        DataPosition(0, 2, 2, 2, 11),
        DataPosition(1, 1, 3, 3, 19),
        DataPosition(1, 2, 4, 4, 22),
    ]


def test_the_end_of_an_epoch_stands_at_the_start_of_the_next() -> None:
    ends = [item for item in fed(a_job(batches([8, 3]), epochs=2)) if isinstance(item, EpochEnd)]
    assert [(end.after.epoch, end.after.position, end.batches, end.samples) for end in ends] == [
        (1, 0, 2, 11),
        (2, 0, 2, 11),
    ]


@pytest.mark.parametrize(
    ("count", "epochs", "completes", "flushes"),
    [
        (4, 1, [False, True, False, True], [False, False, False, False]),
        (3, 1, [False, True, True], [False, False, True]),
        # An update may take its gradients from two epochs; only the very end is no full one.
        (3, 3, [False, True, False, True, False, True, False, True, True], [False] * 8 + [True]),
    ],
)
def test_gradients_are_applied_every_few_microbatches_and_at_the_very_end(
    count: int, epochs: int, completes: list[bool], flushes: list[bool]
) -> None:
    job = a_job(batches([8] * count), epochs=epochs, pipeline=Pipeline(accumulate=2))
    items = [item for item in fed(job) if isinstance(item, TrainBatch)]
    assert [item.completes_update for item in items] == completes
    assert [item.flush for item in items] == flushes
    assert items[-1].after.updates == sum(completes)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_max_updates_ends_within_an_epoch(accumulate: int) -> None:
    job = a_job(batches([8] * 5), epochs=2, max_updates=3, pipeline=Pipeline(accumulate=accumulate))
    items = fed(job)
    assert len(contents(items)) == 3 * accumulate
    assert isinstance(items[-1], TrainBatch) and items[-1].after.updates == 3
    # What is left of the epoch is still there for a run that goes on.
    more = a_job(batches([8] * 5), epochs=2, max_updates=5, pipeline=Pipeline(accumulate=accumulate))
    assert contents(items) + contents(fed(more, items[-1].after)) == contents(fed(more))


def loader(**options: Any) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(*samples(40)), batch_size=8, shuffle=True, **options)


@pytest.mark.parametrize("seeded", [False, True], ids=["seeded by the job", "with a generator of its own"])
@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_a_resumed_feeder_goes_on_with_the_very_next_batch(stop: int, seeded: bool) -> None:
    def job() -> Job:
        return a_job(loader(generator=torch.Generator().manual_seed(3) if seeded else None), epochs=2)

    whole = fed(job())
    assert contents(whole)[:5] != contents(whole)[5:], "each epoch has an order of its own"
    begun = fed(job(), most=stop)
    last = begun[-1]
    assert isinstance(last, TrainBatch | EpochEnd)
    assert contents(begun) + contents(fed(job(), last.after)) == contents(whole)


def test_looking_at_the_first_batches_does_not_change_the_order() -> None:
    job = a_job(loader(generator=torch.Generator().manual_seed(3)))
    expected = [batch[0].flatten().tolist() for batch in loader(generator=torch.Generator().manual_seed(3))]
    peeked = first_batches(job)
    assert contents(fed(job, peeked=peeked)) == expected


def test_an_iterator_keeps_the_batches_that_were_looked_at() -> None:
    job = a_job(iter(batches([8] * 4)))
    peeked = first_batches(job)
    assert contents(fed(job, peeked=peeked)) == contents(fed(a_job(batches([8] * 4))))


def test_a_batch_is_handed_out_before_the_next_one_is_there() -> None:
    asked: list[int] = []

    def slow() -> Iterator[Any]:
        for number, batch in enumerate(batches([8] * 3)):
            asked.append(number)
            yield batch

    given: list[int] = []
    feeder = Feeder(a_job(slow), Structure.of(batches([8])[0]), INPUTS, lambda item: given.append(len(asked)))
    feeder.run()
    assert given[:3] == [1, 2, 3]


def test_every_step_of_the_users_code_is_guarded() -> None:
    steps: list[bool] = []
    inside = False

    @contextmanager
    def guard() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def data() -> Iterator[Any]:
        for batch in batches([8] * 2):
            steps.append(inside)
            yield batch

    first_batches(a_job(data), guard)
    fed(a_job(data, eval_data=data), guard=guard)
    assert steps == [True] * 6 and not inside


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ((torch.zeros(8, 7), torch.zeros(8, dtype=torch.long)), "train_data, batch 3 of epoch 1: inputs has shape 8x7"),
        ((torch.zeros(8, 6), torch.zeros(7, dtype=torch.long)), "a dimension of targets is 7 and that of inputs is 8"),
        ((torch.zeros(8, 6), torch.zeros(8)), "train_data, batch 3 of epoch 1: targets is float32"),
        (torch.zeros(8, 6), "must yield .inputs, targets., but they yield a Tensor"),
        (([torch.zeros(8, 6)] * 2, torch.zeros(8)), "inputs"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(odd: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        fed(a_job([*batches([8, 8]), odd]))


def test_an_exception_names_the_batch_after_those_that_were_looked_at() -> None:
    def torn() -> Iterator[Any]:
        yield from batches([8] * 3)
        raise OSError("the tape is torn")

    job = a_job(torn())
    with pytest.raises(JobFileFailed, match="train_data, batch 4 of epoch 1 failed with OSError: the tape is torn"):
        fed(job, peeked=first_batches(job))


def test_an_epochs_size_is_known_where_the_data_tells() -> None:
    dataset = TensorDataset(*samples(28))
    assert epoch_size(DataLoader(dataset, batch_size=8), 8) == (4, 28)
    assert epoch_size(DataLoader(dataset, batch_size=8, drop_last=True), 8) == (3, 24)
    assert epoch_size(batches([8, 8]), 8) == (2, 16)
    assert epoch_size(iter(batches([8])), 8) is None
    assert epoch_size(lambda: batches([8]), 8) is None
