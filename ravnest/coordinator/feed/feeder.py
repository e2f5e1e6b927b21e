"""Feeder: walks the requester's own iterables and hands out microbatches, with back-pressure.

It runs on the thread that called `train`, because it runs the requester's Python (a DataLoader with its workers, a
generator, a Hugging Face dataset). All global generators are seeded for each epoch, so a resumed run sees the same
order and skips what it has used.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.coordinator.feed.data_order import begin_epoch, data_state, seed_everything, set_data_state
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.errors import JobError
from ravnest.graph.batch import Structure, check_shapes, samples_in
from ravnest.graph.portable import ValueSpec
from ravnest.job import Job
from ravnest.jobfile import users_code


@dataclass(frozen=True, slots=True)
class TrainBatch:
    microbatch: int
    tensors: Mapping[str, torch.Tensor]
    samples: int
    after: DataPosition
    """Position of the run once this microbatch has been applied."""
    completes_update: bool = True
    flush: bool = False
    """Nothing follows, so its update is applied although fewer than `accumulate` gradients are summed."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    microbatch: int
    tensors: Mapping[str, torch.Tensor]
    samples: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All data of an epoch has been handed out."""

    after: DataPosition
    """Position of the run then: the start of the next epoch."""
    batches: int
    samples: int | None
    """Samples in the epoch; None when it was not handed out from its start."""


@dataclass(frozen=True, slots=True)
class EvalEnd:
    """All evaluation batches have been handed out."""


Item = TrainBatch | EvalBatch | EpochEnd | EvalEnd

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Surrounds every step of the requester's own code."""


class Feeder:
    """Hands out a job's items in order to `put`, which blocks while the clusters have no room."""

    def __init__(
        self,
        job: Job,
        structure: Structure,
        inputs: tuple[ValueSpec, ...],
        put: Callable[[Item], None],
        peeked: Sequence[Any] = (),
        guard: Guard = contextlib.nullcontext,
    ) -> None:
        """`peeked` are the batches that were taken from the data to capture the model."""
        self._job = job
        # Only an iterator does not yield them again.
        self._peeked = list(peeked) if isinstance(job.train_data, Iterator) else []
        self._structure = structure
        self._inputs = inputs
        self._put = put
        self._guard = guard
        self._walked: Iterator[Any] = iter(())
        self._summed = 0
        self._evaluated = 0

    def run(self, start: DataPosition = DataPosition()) -> None:  # noqa: B008 (a frozen value)
        """Feeds the whole job from this position. If it is the end of the job, only the last evaluation is fed.

        JobError when the data does not fit the captured model, JobFileFailed when the data raises an exception.
        """
        job, place = self._job, start
        set_data_state(job.train_data, start.data_state)
        while not self._is_done(place):
            place = self._run_epoch(place)
            if place.epoch % job.eval_every == 0 and not self._is_done(place):
                self._evaluate()
        self._evaluate()

    def abandon(self) -> None:
        """Ends a DataLoader's workers without waiting, which takes seconds when they are deep in the user's code."""
        if not getattr(self._walked, "_persistent_workers", False):
            for worker in getattr(self._walked, "_workers", ()):
                worker.terminate()

    def _is_done(self, place: DataPosition) -> bool:
        most = self._job.max_updates
        return place.epoch >= self._job.epochs or (most is not None and place.updates >= most)

    def _run_epoch(self, start: DataPosition) -> DataPosition:
        """Hands out an epoch from this position on; returns the position after it."""
        job, epoch = self._job, start.epoch
        seed_everything(job.seed, epoch)
        begin_epoch(job.train_data, epoch)
        place = replace(start, data_state=data_state(job.train_data))
        where = f"train_data, batch {{}} of epoch {epoch + 1}"
        batches = itertools.chain(self._peeked, self._walk(job.train_batches, where, len(self._peeked)))
        _skip(batches, start)
        batch = next(batches, _NOTHING)
        while batch is not _NOTHING:
            self._summed += 1
            full = self._summed == job.pipeline.accumulate
            # It waits for the next batch only in the last epoch, in which an unfinished update has to be flushed.
            looks_ahead = not full and epoch + 1 == job.epochs
            following = next(batches, _NOTHING) if looks_ahead else None
            flush = following is _NOTHING
            place = self._put_batch(batch, where.format(place.position + 1), place, full or flush, flush)
            if self._is_done(place):
                return place
            batch = following if looks_ahead else next(batches, _NOTHING)
        if place.position == 0:
            raise JobError(_empty(epoch))
        samples = None if start.position else place.samples - start.samples
        end = replace(place, epoch=epoch + 1, position=0, data_state=data_state(job.train_data))
        self._put(EpochEnd(end, place.position, samples))
        return end

    def _put_batch(self, batch: Any, where: str, place: DataPosition, completes: bool, flush: bool) -> DataPosition:
        tensors = self._checked(batch, where)
        samples = samples_in(tensors)
        after = replace(
            place,
            position=place.position + 1,
            microbatches=place.microbatches + 1,
            updates=place.updates + completes,
            samples=place.samples + samples,
        )
        self._put(TrainBatch(place.microbatches, tensors, samples, after, completes, flush))
        self._summed = 0 if completes else self._summed
        return after

    def _evaluate(self) -> None:
        """Hands out the evaluation data once, if there is any."""
        if self._job.eval_data is None:
            return
        where = "eval_data, batch {}"
        for number, batch in enumerate(self._walk(self._job.eval_batches, where), start=1):
            tensors = self._checked(batch, where.format(number))
            # Negative numbers, which no training microbatch has.
            self._evaluated += 1
            self._put(EvalBatch(-self._evaluated, tensors, samples_in(tensors)))
        self._put(EvalEnd())

    def _walk(self, begin: Callable[[], Iterator[Any]], where: str, before: int = 0) -> Iterator[Any]:
        """The batches that the requester's code yields; its exceptions name the batch."""
        with users_code(where.format(before + 1)), self._guard():
            batches = begin()
        self._walked = batches
        for number in itertools.count(before + 1):
            with users_code(where.format(number)), self._guard():
                batch = next(batches, _NOTHING)
            if batch is _NOTHING:
                return
            yield batch

    def _checked(self, batch: Any, where: str) -> dict[str, torch.Tensor]:
        tensors = self._structure.flatten(batch)
        check_shapes(tensors, self._inputs, where)
        return tensors


def first_batches(job: Job, guard: Guard = contextlib.nullcontext) -> list[Any]:
    """The first two batches of the training data, to capture the model; JobError if there is none.

    The order of the data afterwards is unchanged.
    """
    state = data_state(job.train_data)
    seed_everything(job.seed, 0)
    with users_code("train_data"), guard():
        begin_epoch(job.train_data, 0)
        batches = list(itertools.islice(job.train_batches(), 2))
    set_data_state(job.train_data, state)
    if not batches:
        raise JobError(_empty(0))
    return batches


def _skip(batches: Iterator[Any], start: DataPosition) -> None:
    for number in range(start.position):
        if next(batches, _NOTHING) is _NOTHING:
            raise JobError(
                f"train_data has only {number} batches in epoch {start.epoch + 1}, the run to resume had used "
                f"{start.position}; resume with the data it was started with"
            )


def _empty(epoch: int) -> str:
    if epoch == 0:
        return "train_data is empty: it yields no batch; check the dataset and drop_last"
    return (
        f"train_data yields nothing in epoch {epoch + 1}: pass a function that returns a fresh iterator for each epoch"
    )


_NOTHING = object()
