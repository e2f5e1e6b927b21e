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


class ResNet50(nn.Module):
    """The residual network with 50 layers (He et al., 2015), with the stride in the 3 by 3 convolution, as usual."""

    def __init__(self, classes: int = 1000, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers: list[nn.Module] = []
        incoming = width
        for group, count in enumerate(blocks):
            inner = width * 2**group
            for number in range(count):
                stride = 2 if group and not number else 1
                layers.append(Bottleneck(incoming, inner, stride))
                incoming = 4 * inner
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(incoming, classes))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.stem(pictures)))
        return scores


class Bottleneck(nn.Module):
    """Three convolutions with batch norms around a residual, which a fourth one projects where the shape changes."""

    def __init__(self, incoming: int, inner: int, stride: int) -> None:
        super().__init__()
        outgoing = 4 * inner
        self.layers = nn.Sequential(
            nn.Conv2d(incoming, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outgoing, 1, bias=False),
            nn.BatchNorm2d(outgoing),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or incoming != outgoing:
            self.shortcut = nn.Sequential(
                nn.Conv2d(incoming, outgoing, 1, stride, bias=False), nn.BatchNorm2d(outgoing)
            )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(values) + self.shortcut(values))


class Recommender(nn.Module):
    """Probability of a click: one wide table for each feature, whose rows are joined for a small dense network.

    An input has the numbers first and then a row number for each table, all as float32, which is exact below 2 ** 24.
    """

    def __init__(self, rows: tuple[int, ...], width: int, numbers: int = 13) -> None:
        super().__init__()
        self.numbers = numbers
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        joined = numbers + width * len(rows)
        self.dense = nn.Sequential(nn.Linear(joined, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        chosen = features[:, self.numbers :].long()
        joined = features[:, : self.numbers]
        for feature, table in enumerate(self.tables):
            joined = torch.cat([joined, table(chosen[:, feature])], 1)
        scores: torch.Tensor = self.dense(joined)
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
