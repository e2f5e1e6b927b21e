"""Random sample of what the swarm evaluated last, with what it reported: what the written model is held against.

A provider cannot know which batches are in the sample. It is drawn as the batches are fed, in bounded memory, and
counts only as long as nothing was trained on since: then the evaluation is of the state that is saved.
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
class Witnessed:
    """A batch, and what the swarm reported of it."""

    batch: EvalBatch
    provider: str
    """The holder of the leaf that reported it."""
    scores: Mapping[str, float]


class Witness:
    """Of one run. All methods belong to the network's loop, but for `of_now`, once nothing is fed any more."""

    def __init__(self) -> None:
        self._draw = random.SystemRandom()
        self._evaluated = _Reservoir(_MAX_BATCHES, self._draw)
        self._trained = _Reservoir(_MAX_TRAINING_BATCHES, self._draw)
        self._scores: dict[int, tuple[str, Mapping[str, float]]] = {}
        self.source = ""
        """What the batches are of, in words."""

    def begin(self, source: str) -> None:
        """An evaluation begins: what was evaluated before is of another state."""
        self._evaluated = _Reservoir(_MAX_BATCHES, self._draw)
        self._scores = {}
        self.source = source

    def fed(self, batch: EvalBatch) -> None:
        """A batch is about to be evaluated."""
        self._evaluated.offer(batch)

    def came(self, microbatch: int, provider: str, scores: Mapping[str, float]) -> None:
        """What the swarm says of a batch."""
        if any(batch.microbatch == microbatch for batch in self._evaluated.kept):
            self._scores[microbatch] = provider, scores

    def trained(self, microbatch: int, tensors: Mapping[str, torch.Tensor], samples: int) -> None:
        """A microbatch is about to be trained on: what was evaluated is not of the state that will be saved."""
        self.begin("")
        self._trained.offer(EvalBatch(microbatch, tensors, samples))

    @property
    def of_now(self) -> list[Witnessed]:
        """What was evaluated since the last training, in random order."""
        known = [
            Witnessed(batch, *self._scores[batch.microbatch])
            for batch in self._evaluated.kept
            if batch.microbatch in self._scores
        ]
        self._draw.shuffle(known)
        return known

    @property
    def training_batches(self) -> list[Mapping[str, torch.Tensor]]:
        """A few that were trained on."""
        return [batch.tensors for batch in self._trained.kept]


class _Reservoir:
    """Keeps a given number of what it is offered, each with the same chance, and never more bytes than allowed."""

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
    """The first samples of a batch: of every value that has the batch as its first size. `sizes` are the shapes
    as the graph says them. The batch as it is where its first size is not free."""
    first = next((shape[0] for shape in sizes.values() if shape), None)
    if not isinstance(first, str):
        return tensors
    return {
        name: tensor[:samples] if sizes[name] and sizes[name][0] == first else tensor
        for name, tensor in tensors.items()
    }
