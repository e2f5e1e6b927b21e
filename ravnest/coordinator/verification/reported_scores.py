"""Reported scores: a random sample of the batches that the swarm evaluated last, with the scores that it reported.

A provider cannot know which batches are in the sample. It is drawn as the batches are fed, in bounded memory. The
sample counts only until the next training step, so that the evaluation is of the state that is saved.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ravnest.coordinator.feed.feeder import EvalBatch

_MAX_BYTES: Final = 64 << 20
_MAX_BATCHES: Final = 64
_MAX_TRAINING_BATCHES: Final = 4


@dataclass(frozen=True, slots=True)
class ReportedScores:
    """A batch, and the scores that the swarm reported for it."""

    batch: EvalBatch
    provider: str
    """The owner of the leaf that reported them."""
    scores: Mapping[str, float]


class Witness:
    """The sample of one run. All methods run on the network's loop, except `current` once nothing is fed any more."""

    def __init__(self) -> None:
        self._draw = random.SystemRandom()
        self._evaluated = _Reservoir(_MAX_BATCHES, self._draw)
        self._trained = _Reservoir(_MAX_TRAINING_BATCHES, self._draw)
        self._scores: dict[int, tuple[str, Mapping[str, float]]] = {}
        self.source = ""
        """The origin of the batches, in words."""

    def begin(self, source: str) -> None:
        """An evaluation begins: earlier scores are of another state."""
        self._evaluated = _Reservoir(_MAX_BATCHES, self._draw)
        self._scores = {}
        self.source = source

    def fed(self, batch: EvalBatch) -> None:
        """A batch is about to be evaluated."""
        self._evaluated.offer(batch)

    def came(self, microbatch: int, provider: str, scores: Mapping[str, float]) -> None:
        """The swarm reports the scores of a batch."""
        if any(batch.microbatch == microbatch for batch in self._evaluated.kept):
            self._scores[microbatch] = provider, scores

    def trained(self, microbatch: int, tensors: Mapping[str, torch.Tensor], samples: int) -> None:
        """A microbatch is about to be trained on: earlier scores are not of the state that will be saved."""
        self.begin("")
        self._trained.offer(EvalBatch(microbatch, tensors, samples))

    @property
    def current(self) -> list[ReportedScores]:
        """The batches evaluated since the last training step, in random order."""
        known = [
            ReportedScores(batch, *self._scores[batch.microbatch])
            for batch in self._evaluated.kept
            if batch.microbatch in self._scores
        ]
        self._draw.shuffle(known)
        return known

    @property
    def training_batches(self) -> list[Mapping[str, torch.Tensor]]:
        """A few batches that were trained on."""
        return [batch.tensors for batch in self._trained.kept]


class _Reservoir:
    """Keeps a given number of the items that it is offered, each with the same probability, within a limit of bytes."""

    def __init__(self, most: int, draw: random.Random) -> None:
        self.kept: list[EvalBatch] = []
        self._most = most
        self._draw = draw
        self._offered = 0

    def offer(self, batch: EvalBatch) -> None:
        if not self._offered:
            size = sum(tensor.nbytes for tensor in batch.tensors.values())
            self._most = max(1, min(self._most, _MAX_BYTES // max(1, size)))
        self._offered += 1
        if len(self.kept) < self._most:
            self.kept.append(batch)
        elif (place := self._draw.randrange(self._offered)) < self._most:
            self.kept[place] = batch


def shortened(
    tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, Sequence[int | str]], samples: int
) -> Mapping[str, torch.Tensor]:
    """The first samples of a batch, for every value whose first size is the batch's. `sizes` are the shapes in the
    graph. A batch whose first size is fixed is returned unchanged."""
    first = next((shape[0] for shape in sizes.values() if shape), None)
    if not isinstance(first, str):
        return tensors
    return {
        name: tensor[:samples] if sizes[name] and sizes[name][0] == first else tensor
        for name, tensor in tensors.items()
    }
