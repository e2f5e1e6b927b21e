"""Tasks for the comparison of ways of training: digits and characters, with models that have enough layers for eight
stages.

The data is that of benchmarks/learning.py. Digits are trained with a constant learning rate; characters with a short
warm-up and a rate that decays to zero, like language models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import nn

import ravnest
from benchmarks.learning import characters, digits

_DIGITS_BATCHES: Final = 22
_CHARACTER_BATCHES: Final = 250
_WARM_UP: Final = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A task; `job(seed, epochs, rate, accumulate)` evaluates after every epoch."""

    name: str
    title: str
    job: Callable[[int, int, float, int], ravnest.Job]
    rates: tuple[float, ...]
    """The learning rates that are tried for every way of training."""
    epochs: int
    quick_epochs: int
    epoch_batches: int
    evaluations: int
    """Number of final evaluations whose mean is the loss of a run; one if the rate has decayed to zero."""
    loss_to_reach: float
    """The loss for the comparison of the time to a fixed loss."""


class DigitsNet(nn.Module):
    """Six convolutions with batch norms and two linear layers: enough of both for eight stages."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(((1, 16), (16, 16), (16, 32), (32, 32), (32, 48), (48, 48))):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            if number in (1, 3):
                layers += [nn.MaxPool2d(2), nn.Dropout(0.1)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(48 * 4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(images))
        return scores


def _digits(seed: int, epochs: int, rate: float, accumulate: int) -> ravnest.Job:
    job = digits(seed, epochs)
    torch.manual_seed(seed)
    return replace(job, model=DigitsNet(), metrics={}, optimizer=partial(torch.optim.AdamW, lr=rate))


def _characters(seed: int, epochs: int, rate: float, accumulate: int) -> ravnest.Job:
    steps = -(-epochs * _CHARACTER_BATCHES // accumulate)
    schedule = partial(
        torch.optim.lr_scheduler.OneCycleLR,
        max_lr=rate,
        # One more, because the schedule is also stepped after the last update.
        total_steps=steps + 1,
        pct_start=_WARM_UP,
        cycle_momentum=False,
    )
    job = characters(seed, epochs)
    return replace(job, optimizer=partial(torch.optim.AdamW, lr=rate), schedule=schedule)


TASKS: Final = {
    "gpt": Task(
        "gpt", "character GPT", _characters, (2e-3, 4e-3, 8e-3, 1.6e-2), 12, 2, _CHARACTER_BATCHES, 1, loss_to_reach=2.2
    ),
    "digits": Task(
        "digits", "digits CNN", _digits, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), 20, 6, _DIGITS_BATCHES, 4, loss_to_reach=0.1
    ),
}
