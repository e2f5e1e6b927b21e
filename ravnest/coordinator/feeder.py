"""The feeder: walks the requester's own iterables and hands out microbatches, with back-pressure.

It runs on the thread that called `train`, because it runs the requester's Python (a DataLoader with its workers, a
generator, a Hugging Face dataset). Everything random is seeded afresh for each epoch, so a resumed run sees the same
order and skips what it has seen.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ravnest.errors import JobError
from ravnest.graph.batch import Structure, check_shapes, samples_in
from ravnest.graph.portable import ValueSpec
from ravnest.job import Job


@dataclass(frozen=True, slots=True)
class TrainBatch:
    microbatch: int
    epoch: int
    position: int
    """Microbatches of this epoch handed out so far, this one included."""
    tensors: Mapping[str, torch.Tensor]
    samples: int
    last: bool
    """Nothing follows: what is summed is to be applied with it."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    microbatch: int
    tensors: Mapping[str, torch.Tensor]
    samples: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    epoch: int
    samples: int
    """Samples this epoch handed out (fewer than the epoch has, where it was resumed in the middle)."""
    whole: bool
    """Whether it was handed out from its start."""


@dataclass(frozen=True, slots=True)
class EvalEnd:
    """All evaluation batches have been handed out."""


Item = TrainBatch | EvalBatch | EpochEnd | EvalEnd


class Feeder:
    """Hands out a job's items in order, to `put`, which blocks while the swarm has enough."""

    def __init__(
        self,
        job: Job,
        structure: Structure,
        inputs: tuple[ValueSpec, ...],
        put: Callable[[Item], None],
        peeked: Sequence[Any] = (),
    ) -> None:
        """`peeked` are the batches that were taken from the data to capture the model on."""
        self._job = job
        # An iterator gave them away for good; anything else starts afresh and yields them again.
        self._peeked = list(peeked) if isinstance(job.train_data, Iterator) else []
        self._structure = structure
        self._inputs = inputs
        self._put = put
        self._evaluated = 0

    def run(self, *, first_epoch: int = 0, skip: int = 0, microbatch: int = 0) -> None:
        """Feeds the whole job from the given place; JobError where the data is not what was captured."""
        job = self._job
        most = None if job.max_updates is None else job.max_updates * job.pipeline.accumulate
        for epoch in range(first_epoch, job.epochs):
            seed_everything(job.seed, epoch)
            samples = position = 0
            for batch, is_last in _with_last(self._skipped(self._batches(), skip, epoch)):
                position += 1
                tensors = self._checked(batch, f"train_data, batch {skip + position} of epoch {epoch + 1}")
                count = samples_in(tensors)
                final = (is_last and epoch + 1 == job.epochs) or microbatch + 1 == most
                self._put(TrainBatch(microbatch, epoch, skip + position, tensors, count, final))
                microbatch += 1
                samples += count
                if microbatch == most:
                    break
            if position == 0 and skip == 0:
                raise JobError(_empty("train_data", epoch))
            self._put(EpochEnd(epoch, samples, skip == 0))
            skip = 0
            done = microbatch == most or epoch + 1 == job.epochs
            if done or (epoch + 1) % job.eval_every == 0:
                self.evaluate()
            if done:
                return

    def evaluate(self) -> None:
        """Hands out the evaluation data once, where there is any."""
        if self._job.eval_data is None:
            return
        for number, batch in enumerate(self._job.eval_batches()):
            tensors = self._checked(batch, f"eval_data, batch {number + 1}")
            # Numbers of their own, below zero: they can never be taken for a training microbatch.
            self._evaluated += 1
            self._put(EvalBatch(-self._evaluated, tensors, samples_in(tensors)))
        self._put(EvalEnd())

    def _batches(self) -> Iterator[Any]:
        return itertools.chain(self._peeked, self._job.train_batches())

    def _checked(self, batch: Any, where: str) -> dict[str, torch.Tensor]:
        tensors = self._structure.flatten(batch)
        check_shapes(tensors, self._inputs, where)
        return tensors

    def _skipped(self, batches: Iterator[Any], skip: int, epoch: int) -> Iterator[Any]:
        for number in range(skip):
            if next(batches, _NOTHING) is _NOTHING:
                raise JobError(
                    f"train_data has only {number} batches in epoch {epoch + 1}, the run to resume had used {skip}; "
                    "resume with the data it was started with"
                )
        return batches


def first_batches(job: Job) -> list[Any]:
    """The first two batches of the training data, to capture on; JobError when there is none."""
    seed_everything(job.seed, 0)
    batches = []
    for batch in job.train_batches():
        batches.append(batch)
        if len(batches) == 2:
            break
    if not batches:
        raise JobError(_empty("train_data", 0))
    return batches


def seed_everything(seed: int, epoch: int) -> None:
    """The same shuffle for the same epoch of the same job, whenever it is run."""
    mixed = (seed * 1_000_003 + epoch) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    item = next(items, _NOTHING)
    while item is not _NOTHING:
        following = next(items, _NOTHING)
        yield item, following is _NOTHING
        item = following


def _empty(field: str, epoch: int) -> str:
    if epoch == 0:
        return f"{field} is empty: it yields no batch; check the dataset and drop_last"
    return f"{field} yields nothing in epoch {epoch + 1}: pass a function that returns a fresh iterator for each epoch"


_NOTHING = object()
