"""Job of the chaos tests: a small network on synthetic data.

The file is copied into a folder and served from there. An epoch lasts until the file `end_epoch` appears. Its length is
recorded and used in every later run, so that a resumed run, and the run without faults for the comparison, have the
same data. The file `evaluating` exists while an evaluation is being fed.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest

HERE = Path(__file__).parent
EPOCHS, CLUSTERS = map(int, (HERE / "form").read_text().split())
FEATURES, WIDTH, CLASSES, BATCH = 32, 256, 10, 16
BATCHES = 2048
HARD = 1.6
"""Noise relative to the distance of two classes: large enough that the loss falls for as long as the faults last."""


class Epochs:
    """The same batches in a loop; the epoch ends on request."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self._batches = list(batches(inputs, labels))
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        length = HERE / f"epoch-{self._epoch}.length"
        asked = (HERE / "end_epoch", HERE / "end_run")
        number = 0
        known = int(length.read_text()) if length.exists() else None
        while number != known:
            if known is None and number and any(path.exists() for path in asked):
                # Written first, so that a coordinator that is killed now ends the epoch here again.
                length.with_suffix(".new").write_text(str(number))
                length.with_suffix(".new").rename(length)
                asked[0].unlink(missing_ok=True)
                return
            yield self._batches[number % len(self._batches)]
            number += 1


def batches(inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(inputs, BATCH), torch.split(labels, BATCH), strict=True)


def evaluation(inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    mark = HERE / "evaluating"
    mark.touch()
    yield from batches(inputs, labels)
    mark.unlink(missing_ok=True)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + HARD * torch.randn(count, FEATURES, generator=generator), labels


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


job = ravnest.Job(
    model=net(),
    loss=F.cross_entropy,
    train_data=Epochs(*samples(BATCHES * BATCH, 1)),
    eval_data=partial(evaluation, *samples(100 * BATCH, 2)),
    optimizer=partial(torch.optim.SGD, lr=0.002, momentum=0.9),
    epochs=EPOCHS,
    # Slow lines should have an effect: an int8 codec, chosen because one line was slow at first, would hide it.
    pipeline=ravnest.Pipeline(codec="float32"),
    # Rounds are seconds apart, so that lines and processors also do other work.
    averaging=ravnest.Averaging(every=100 * BATCH * CLUSTERS),
    checkpoint=ravnest.Checkpoint(every_seconds=4.0),
)
