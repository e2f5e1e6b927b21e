"""Models of benchmarks.pipeline: eight equal blocks, with exactly 1 MiB of float32 between two blocks.

A stage computes for a few milliseconds only, so that the pace determines its time. All contenders cut the model before
the same blocks, at equal distances, as a user would do by hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import SMALL, Batch, Block, next_token_loss, token_batches

BLOCKS = 8
CROSSING_BYTES = 1 << 20
_WIDTH, _INNER, _VOCABULARY, _CONTEXT, _SEQUENCES = 256, 16, 64, 64, 16
_REAL_SEQUENCES = 4
_CHANNELS, _SIDE, _PICTURES, _CLASSES = 16, 32, 16, 10

assert _SEQUENCES * _CONTEXT * _WIDTH * 4 == CROSSING_BYTES == _PICTURES * _CHANNELS * _SIDE * _SIDE * 4


class Blocks(nn.Module):
    """A first module, equal blocks, and a last module."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(blocks)
        self.last = last

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        result: torch.Tensor = self.last(values)
        return result


@dataclass(frozen=True, slots=True)
class Task:
    """A model with its loss and its batches, each of which is one microbatch."""

    name: str
    model: Callable[[], Blocks]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: Callable[[], list[Batch]]
    samples: int
    """Samples in a microbatch."""
    blocks: int = BLOCKS


def cut_blocks(stages: int, blocks: int = BLOCKS) -> tuple[int, ...]:
    """The first blocks of all stages but the first. Stages are as equal as possible, the longer ones first."""
    assert 1 <= stages <= blocks
    return tuple(-(-number * blocks // stages) for number in range(1, stages))


def stage_module(model: Blocks, stage: int, stages: int) -> nn.Sequential:
    """One stage of the same cuts, for contenders that take modules."""
    blocks = len(model.blocks)
    bounds = (0, *cut_blocks(stages, blocks), blocks)
    parts: list[nn.Module] = list(model.blocks[bounds[stage] : bounds[stage + 1]])
    if stage == 0:
        parts.insert(0, model.first)
    if stage == stages - 1:
        parts.append(model.last)
    return nn.Sequential(*parts)


class _Embedding(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return embedded


class _GPTBlock(nn.Module):
    """A transformer block whose attention and feed-forward network are narrower than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _INNER)
        self.out = nn.Linear(_INNER, _WIDTH)
        self.feed_norm = nn.LayerNorm(_WIDTH)
        self.feed = nn.Sequential(nn.Linear(_WIDTH, _INNER), nn.GELU(), nn.Linear(_INNER, _WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        shaped = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, 1, _INNER)
        query, key, value = shaped.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, _INNER))
        fed: torch.Tensor = hidden + self.feed(self.feed_norm(hidden))
        return fed


class _CNNBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(_CHANNELS)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return pictures + F.relu(self.norm(self.convolution(pictures)))


def _gpt() -> Blocks:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False))
    return Blocks(_Embedding(_VOCABULARY, _CONTEXT, _WIDTH), [_GPTBlock() for _ in range(BLOCKS)], head)


def _real_gpt() -> Blocks:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(SMALL.width), nn.Linear(SMALL.width, SMALL.vocabulary, bias=False))
    first = _Embedding(SMALL.vocabulary, SMALL.context, SMALL.width)
    return Blocks(first, [Block(SMALL) for _ in range(SMALL.layers)], head)


def _cnn() -> Blocks:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(_CHANNELS * 16, _CLASSES))
    return Blocks(nn.Conv2d(1, _CHANNELS, 3, padding=1), [_CNNBlock() for _ in range(BLOCKS)], head)


def _token_batches() -> list[Batch]:
    tokens = torch.randint(_VOCABULARY, (8, _SEQUENCES, _CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def _picture_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn((8, _PICTURES, 1, _SIDE, _SIDE), generator=generator)
    return list(zip(pictures, torch.randint(_CLASSES, (8, _PICTURES), generator=generator), strict=True))


TASKS = {
    "gpt": Task("gpt", _gpt, next_token_loss, _token_batches, _SEQUENCES),
    "real": Task(
        "real", _real_gpt, next_token_loss, lambda: token_batches(SMALL, _REAL_SEQUENCES), _REAL_SEQUENCES, SMALL.layers
    ),
    "cnn": Task("cnn", _cnn, F.cross_entropy, _picture_batches, _PICTURES),
}
