"""Models of the benchmarks in plain PyTorch, with synthetic data."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GPTSize:
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


SMALL = GPTSize(layers=6, width=320, heads=5, vocabulary=4096, context=128)
"""10.0 million parameters when head and embedding are not tied."""

LARGE = GPTSize(layers=10, width=832, heads=13, vocabulary=8192, context=128)
"""96.9 million parameters when head and embedding are not tied."""


GPT2 = GPTSize(layers=12, width=768, heads=12, vocabulary=50304, context=512)
"""123.7 million parameters when head and embedding are tied: the smallest GPT-2, with half its context."""


class GPT(nn.Module):
    """A transformer that predicts the next token; `tied` shares one matrix between the embedding and the head."""

    def __init__(self, size: GPTSize, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(_initialise)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and around a residual."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.feed_norm = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        shaped = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = shaped.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: torch.Tensor = hidden + self.feed(self.feed_norm(hidden))
        return fed


class Convolutions(nn.Module):
    """Six convolutions with batch norms over small images, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 32, 64, 64, 128, 128)
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            stride = 2 if number in (2, 4) else 1
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128 * 16, 10))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(pictures)
        return scores


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Repeated:
    """A few prepared batches, repeated: `steps` batches in each pass."""

    def __init__(self, batches: list[Batch], steps: int) -> None:
        self.batches = batches
        self._steps = steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._steps):
            yield self.batches[step % len(self.batches)]


def token_batches(size: GPTSize, batch_size: int, count: int = 8) -> list[Batch]:
    """Random tokens; the target of each is the token after it."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, batch_size, size.context + 1)
    tokens = torch.randint(size.vocabulary, shape, generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def picture_batches(batch_size: int, count: int = 8) -> list[Batch]:
    """Random images of 32 by 32 pixels, and a random class for each."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn((count, batch_size, 3, 32, 32), generator=generator)
    return list(zip(pictures, torch.randint(10, (count, batch_size), generator=generator), strict=True))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
