"""Tasks of benchmarks.scale: real models at their usual size, each with its loss, its microbatches and its pieces.

The language models come from transformers, as a user gets them from there: built from the standard configuration, tied
unless the task says otherwise, with dropout. Without transformers, the GPT of benchmarks/models.py takes their place.
The pieces of a model are for `torch.distributed.pipelining`, which runs one module per stage.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ravnest
from benchmarks.models import GPT, GPT2, SMALL, Batch, GPTSize, Recommender, Repeated, ResNet50, next_token_loss

_TOKENS = 64
_SEQUENCES = 2
_PICTURES = 2
_CLICKS = 64
_NUMBERS = 13
_TABLES = (150_000, 110_000, 80_000, 60_000, 45_000, 30_000, 15_000, 10_000)
_MASKED_SHARE = 0.15
_NOT_MASKED = -100
_LR = 1e-4


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model that takes one tensor and returns one."""

    owns: tuple[str, ...]
    """Beginnings of the names of its parameters."""
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Task:
    """A model with its loss and its batches, each of which is one microbatch."""

    title: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    batches: Callable[[], list[Batch]]
    pieces: Callable[[Any], list[Piece]]
    """The model as a sequence of modules, for cuts by hand."""
    samples: int
    """Samples in a microbatch."""
    steps: int
    """Microbatches of one measurement."""
    tied: tuple[str, str] | None = None
    """Names of the tied weight in the first and in the last piece's module."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def job(self, steps: int) -> ravnest.Job:
        """The job that `ravnest train` gets: as much as possible is Ravnest's own choice."""
        return ravnest.Job(
            model=self.build(),
            loss=self.loss,
            train_data=Repeated(self.batches(), steps),
            optimizer=partial(torch.optim.AdamW, lr=_LR),
            checkpoint=ravnest.Checkpoint(every_seconds=None),
        )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(parameters, lr=_LR)


class Tokens(nn.Module):
    """A transformers model that takes one tensor of tokens and returns the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return logits


class _Steps(nn.Module):
    """Modules and functions, one after the other."""

    def __init__(self, modules: Sequence[nn.Module], run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._run = run

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._run(values, *self.parts)


def _first(result: Any) -> torch.Tensor:
    """The hidden values: some versions of transformers return them in a tuple."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _gpt2(tied: bool) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return Tokens(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, tie_word_embeddings=tied)))


def gpt2_pieces(model: Tokens) -> list[Piece]:
    inner: Any = model.model
    body = inner.transformer

    def embed(tokens: torch.Tensor, words: nn.Module, places: nn.Module, drop: nn.Module) -> torch.Tensor:
        numbers = torch.arange(tokens.shape[1])
        return _first(drop(words(tokens) + places(numbers)))

    def block(hidden: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return _first(layer(hidden))

    def head(hidden: torch.Tensor, norm: nn.Module, linear: nn.Module) -> torch.Tensor:
        return _first(linear(norm(hidden)))

    name = "model.transformer."
    return [
        Piece((f"{name}wte.", f"{name}wpe."), _Steps([body.wte, body.wpe, body.drop], embed)),
        *(Piece((f"{name}h.{number}.",), _Steps([layer], block)) for number, layer in enumerate(body.h)),
        Piece((f"{name}ln_f.", "model.lm_head."), _Steps([body.ln_f, inner.lm_head], head)),
    ]


def _bert() -> nn.Module:
    transformers = importlib.import_module("transformers")
    return Tokens(transformers.BertForMaskedLM(transformers.BertConfig()))


def bert_pieces(model: Tokens) -> list[Piece]:
    inner: Any = model.model

    def plain(values: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return _first(layer(values))

    layers = inner.bert.encoder.layer
    name = "model.bert."
    return [
        Piece((f"{name}embeddings.",), _Steps([inner.bert.embeddings], plain)),
        *(Piece((f"{name}encoder.layer.{number}.",), _Steps([layer], plain)) for number, layer in enumerate(layers)),
        Piece(("model.cls.",), _Steps([inner.cls], plain)),
    ]


def gpt_pieces(model: GPT) -> list[Piece]:
    def embed(tokens: torch.Tensor, words: nn.Module, places: nn.Module) -> torch.Tensor:
        return _first(words(tokens) + places(torch.arange(tokens.shape[1])))

    return [
        Piece(("tokens.", "positions."), _Steps([model.tokens, model.positions], embed)),
        *(Piece((f"blocks.{number}.",), block) for number, block in enumerate(model.blocks)),
        Piece(("norm.", "head."), nn.Sequential(model.norm, model.head)),
    ]


def resnet_pieces(model: ResNet50) -> list[Piece]:
    return [
        Piece(("stem.",), model.stem),
        *(Piece((f"blocks.{number}.",), block) for number, block in enumerate(model.blocks)),
        Piece(("head.",), model.head),
    ]


class _Table(nn.Module):
    """Appends the rows of one table; its row numbers are column `feature` after the numbers."""

    def __init__(self, table: nn.Embedding, feature: int) -> None:
        super().__init__()
        self.table = table
        self._feature = feature

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # A pipeline infers its shapes with any values, also with row numbers that the table does not have.
        chosen = values[:, _NUMBERS + self._feature].detach().long().clamp(0, self.table.num_embeddings - 1)
        return torch.cat([values, self.table(chosen)], 1)


class _Dense(nn.Module):
    """The dense network, which leaves the row numbers out."""

    def __init__(self, dense: nn.Module, features: int) -> None:
        super().__init__()
        self.dense = dense
        self._features = features

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = values[:, _NUMBERS + self._features :]
        return _first(self.dense(torch.cat([values[:, :_NUMBERS], rows], 1)))


def recommender_pieces(model: Recommender) -> list[Piece]:
    return [
        *(
            Piece((f"tables.{number}.",), _Table(_embedding(table), number))
            for number, table in enumerate(model.tables)
        ),
        Piece(("dense.",), _Dense(model.dense, len(model.tables))),
    ]


def _embedding(table: nn.Module) -> nn.Embedding:
    assert isinstance(table, nn.Embedding)
    return table


def _recommender() -> nn.Module:
    return Recommender(_TABLES, 128, _NUMBERS)


def _clicked(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores.flatten(), targets)


def _token_batches(vocabulary: int) -> list[Batch]:
    """Random tokens; the target of each is the token after it."""
    tokens = torch.randint(vocabulary, (8, _SEQUENCES, _TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def _masked_batches(vocabulary: int) -> list[Batch]:
    """Random tokens, some of which are hidden; only those are targets."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for tokens in torch.randint(1000, vocabulary, (8, _SEQUENCES, _TOKENS), generator=generator):
        hidden = torch.rand(tokens.shape, generator=generator) < _MASKED_SHARE
        found.append((tokens.masked_fill(hidden, 103), tokens.masked_fill(~hidden, _NOT_MASKED)))
    return found


def _picture_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn((4, _PICTURES, 3, 224, 224), generator=generator)
    return list(zip(pictures, torch.randint(1000, (4, _PICTURES), generator=generator), strict=True))


def _click_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(8):
        numbers = torch.randn((_CLICKS, _NUMBERS), generator=generator)
        chosen = [torch.randint(rows, (_CLICKS, 1), generator=generator) for rows in _TABLES]
        clicked = torch.randint(2, (_CLICKS,), generator=generator).float()
        found.append((torch.cat([numbers, *(each.float() for each in chosen)], 1), clicked))
    return found


def _own_gpt(size: GPTSize, *, tied: bool, steps: int) -> Task:
    title = f"GPT, {size.layers} layers of {size.width}, {'tied' if tied else 'untied'}"
    batches, both = partial(_token_batches, size.vocabulary), ("tokens.weight", "head.weight")
    model = partial(GPT, size, tied=tied)
    return Task(title, model, next_token_loss, batches, gpt_pieces, _SEQUENCES, steps, both if tied else None)


def _tasks() -> dict[str, Task]:
    tokens, words = partial(_token_batches, 50257), partial(_masked_batches, 30522)
    gpt2_tie = ("model.transformer.wte.weight", "model.lm_head.weight")
    bert_tie = ("model.bert.embeddings.word_embeddings.weight", "model.cls.predictions.decoder.weight")
    found = {}
    if importlib.util.find_spec("transformers") is None:
        found["gpt2"] = _own_gpt(GPT2, tied=True, steps=16)
        found["gpt2-untied"] = _own_gpt(GPT2, tied=False, steps=16)
    else:
        found["gpt2"] = Task(
            "GPT-2 small", partial(_gpt2, True), next_token_loss, tokens, gpt2_pieces, _SEQUENCES, 12, gpt2_tie
        )
        found["gpt2-untied"] = Task(
            "GPT-2 small, untied", partial(_gpt2, False), next_token_loss, tokens, gpt2_pieces, _SEQUENCES, 12
        )
        found["bert"] = Task("BERT-base", _bert, next_token_loss, words, bert_pieces, _SEQUENCES, 12, bert_tie)
    found["resnet50"] = Task("ResNet-50", ResNet50, F.cross_entropy, _picture_batches, resnet_pieces, _PICTURES, 16)
    found["recommender"] = Task(
        "recommender, 64M", _recommender, _clicked, _click_batches, recommender_pieces, _CLICKS, 30
    )
    return found


_MODELS = _tasks()

MODELS = tuple(_MODELS)
"""Tasks on the cores of this machine."""

LINE_TASKS = ("small", "small-untied")
"""Tasks on slow lines: small enough that the lines, and not the cores of this machine, decide."""

TASKS = {
    **_MODELS,
    "small": _own_gpt(SMALL, tied=True, steps=60),
    "small-untied": _own_gpt(SMALL, tied=False, steps=60),
}
"""All tasks by name."""
