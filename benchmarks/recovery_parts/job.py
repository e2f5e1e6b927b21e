"""Job of benchmarks.recovery: a small network of 2 million parameters, with endless data."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ravnest

BATCH, FEATURES, WIDTH, CLASSES = 16, 64, 512, 10


def data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, BATCH, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (64, BATCH), generator=generator)
    yield from itertools.cycle(zip(inputs, labels, strict=True))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


job = ravnest.Job(
    model=net(),
    loss=F.cross_entropy,
    train_data=data,
    optimizer=partial(torch.optim.AdamW, lr=1e-4),
    checkpoint=ravnest.Checkpoint(every_seconds=15.0),
)
