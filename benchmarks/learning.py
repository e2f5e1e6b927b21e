"""Learning tasks of the quality benchmarks: recognition of digits, and prediction of characters of the documentation.

Nothing is downloaded: the digits come with scikit-learn, and the text is in the repository. A seed determines the
initial weights, the order of the data and all random numbers of the model, so that two runs with one seed differ only
in the way of training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import torch
from torch import nn
from torch.utils.data import DataLoader

import ravnest
from benchmarks.models import GPT, Batch, GPTSize, next_token_loss
from benchmarks.report import ROOT
from ravnest.jobfile import load_job

CHARACTERS: Final = GPTSize(layers=2, width=64, heads=4, vocabulary=96, context=16)
"""0.11 million parameters."""

_WINDOWS: Final = 8
_EVAL_WINDOWS: Final = 128
_PART_CHARACTERS: Final = 1024
_OTHER: Final = 95


@dataclass(frozen=True, slots=True)
class Task:
    """A task; `job(seed, epochs)` evaluates after every epoch."""

    title: str
    job: Callable[[int, int], ravnest.Job]
    batch_size: int
    epochs: int
    quick_epochs: int


def digits(seed: int, epochs: int) -> ravnest.Job:
    """The network, the data and the optimizer of examples/digits: 22 batches of 64 images an epoch."""
    example = load_job(str(ROOT / "examples/digits/job.py"))
    assert isinstance(example.train_data, DataLoader)
    torch.manual_seed(seed)
    return replace(
        example,
        model=type(example.model)(),
        # Without a generator of its own, the job's seed determines the order.
        train_data=DataLoader(example.train_data.dataset, batch_size=64, shuffle=True, drop_last=True),
        epochs=epochs,
        seed=seed,
        checkpoint=ravnest.Checkpoint(every_seconds=None),
    )


def characters(seed: int, epochs: int) -> ravnest.Job:
    """A small GPT that predicts the next character: 250 batches of 8 windows an epoch."""
    train, held_out = documentation()
    torch.manual_seed(seed)
    model = GPT(CHARACTERS)
    _initialise(model)
    count = (len(held_out) - 1) // CHARACTERS.context
    inputs, targets = (t[: count * CHARACTERS.context].view(count, -1) for t in (held_out, held_out[1:]))
    return ravnest.Job(
        model=model,
        loss=next_token_loss,
        train_data=Windows(train, batches=250),
        eval_data=list(zip(*(torch.split(t, _EVAL_WINDOWS) for t in (inputs, targets)), strict=True)),
        optimizer=partial(torch.optim.AdamW, lr=4e-3),
        epochs=epochs,
        seed=seed,
        checkpoint=ravnest.Checkpoint(every_seconds=None),
    )


TASKS: Final = (
    Task("digits CNN", digits, batch_size=64, epochs=20, quick_epochs=10),
    Task("character GPT", characters, batch_size=_WINDOWS, epochs=20, quick_epochs=4),
)


class Windows:
    """Batches of windows at random places of a text, drawn with torch's global generator."""

    def __init__(self, text: torch.Tensor, batches: int) -> None:
        self._text = text
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        length = CHARACTERS.context + 1
        for _ in range(self._batches):
            starts = torch.randint(len(self._text) - length, (_WINDOWS, 1))
            windows = self._text[starts + torch.arange(length)]
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """README and docs/ as character numbers: nine tenths for training, and every tenth kilobyte held out."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    numbers = torch.tensor([_number(character) for character in text])
    parts = torch.split(numbers, _PART_CHARACTERS)
    return (
        torch.cat([part for place, part in enumerate(parts) if place % 10 != 9]),
        torch.cat([part for place, part in enumerate(parts) if place % 10 == 9]),
    )


def _number(character: str) -> int:
    """A number for a line end, for each of 94 printable ASCII characters, and one for all others."""
    if character == "\n":
        return 0
    place = ord(character) - ord(" ") + 1
    return place if 1 <= place < _OTHER else _OTHER


def _initialise(model: nn.Module) -> None:
    """Initialise weights in proportion to the width: the usual 0.02 is for a width of 768, and learns slowly at 64."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ("tokens" in name or "positions" in name):
            nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 2:
            ends_residual = name.endswith(("out.weight", "feed.2.weight"))
            nn.init.normal_(parameter, std=(0.3 if ends_residual else 1.0) / parameter.shape[1] ** 0.5)
