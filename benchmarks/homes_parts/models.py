"""Models and data of benchmarks.homes: many parameters, little compute, and small activations.

`wide-5`, `wide-50` and `wide-200` are stacks of lookup tables with this many million parameters: each block looks the
tokens up in a table of its own, adds the rows to what the blocks before computed, and mixes them with a small matrix.
`gpt2-5` is a GPT-2 of Hugging Face with 5 million parameters.

The tokens of the data are drawn from a power law, and each token has one of a few classes, the same one everywhere. A
model learns the classes of frequent tokens first; the loss falls steadily for as long as a run takes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH: Final = 4
CONTEXT: Final = 64
CLASSES: Final = 32
RATE: Final = 3e-4
_WIDTH: Final = 128
_BLOCKS: Final = 8
_GPT2_VOCABULARY: Final = 16_384
_POWER: Final = 3.0
"""Tokens are floor(vocabulary * u ** power) with u evenly from 0 to 1: the larger the power, the fewer are frequent."""
END: Final = "end"
"""File in the folder of a job whose existence ends the data."""


class WideTables(nn.Module):
    """Blocks of a lookup table and a mixing matrix, then a classifier of each token."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, _WIDTH) for _ in range(_BLOCKS))
        self.mixes = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(*tokens.shape, _WIDTH)
        for table, mix, norm in zip(self.tables, self.mixes, self.norms, strict=True):
            hidden = hidden + F.gelu(mix(norm(hidden + table(tokens))))
        out: Tensor = self.head(hidden)
        return out


def _wide(million: int) -> nn.Module:
    return WideTables(_rows(million))


def _rows(million: int) -> int:
    return round(million * 1e6 / (_BLOCKS * _WIDTH))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=_GPT2_VOCABULARY, n_positions=CONTEXT, n_embd=192, n_layer=4, n_head=4)
    model: nn.Module = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call,unused-ignore]
    return model


def token_loss(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), classes.flatten())


def _gpt2_loss(out: Any, classes: Tensor) -> Tensor:
    return token_loss(out.logits, classes)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and what it is trained on."""

    name: str
    parameters: int
    vocabulary: int
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]

    def made(self) -> nn.Module:
        """The model with the same initial weights each time."""
        torch.manual_seed(0)
        return self.build()

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of tokens and their classes, without end."""
        classes = torch.randint(CLASSES, (self.vocabulary,), generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed + 1)
        while True:
            even = torch.rand(BATCH, CONTEXT, generator=generator, dtype=torch.float64)
            tokens = (self.vocabulary * even**_POWER).long()
            yield tokens, classes[tokens]


def _wide_model(million: int) -> Model:
    return Model(f"wide-{million}", million * 10**6, _rows(million), partial(_wide, million), token_loss)


MODELS: Final = {
    "gpt2-5": Model("gpt2-5", 5_000_000, _GPT2_VOCABULARY, _gpt2, _gpt2_loss),
    **{
        f"wide-{million}": Model(
            f"wide-{million}", million * 10**6, _rows(million), partial(_wide, million), token_loss
        )
        for million in (5, 50, 200)
    },
}

FIRST_LOSS: Final = math.log(CLASSES)
"""About the loss of an untrained `WideTables`."""


class UntilAsked:
    """The batches of a model until the file `end` appears in a folder."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._end = folder / END

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self._model.batches(0)):
            # The first batches are needed to capture the model.
            if number > 1 and self._end.exists():
                return
            yield batch


def job_of(name: str, folder: Path) -> Any:
    """The job that trains this model until the file `end` appears in the folder, with default settings."""
    import ravnest

    model = MODELS[name]
    return ravnest.Job(
        model=model.made(),
        loss=model.loss,
        train_data=UntilAsked(model, folder),
        optimizer=partial(torch.optim.AdamW, lr=RATE),
        epochs=1,
    )
