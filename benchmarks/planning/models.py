"""Models of the size that people train, for the cuts that the planner makes in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, GPT2, Batch, GPTSize, next_token_loss
from ravnest import Job

_TOKENS = 64
_BATCH = 2


class Bottleneck(nn.Module):
    """Three convolutions with batch norms around a residual."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(pictures)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(pictures))


class ResNet50(nn.Module):
    """The 50 layers of ResNet: large activations in front, most parameters at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        layers: list[nn.Module] = []
        before = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            stride = 1 if width == 64 else 2
            made = [Bottleneck(before if n == 0 else 4 * width, width, stride if n == 0 else 1) for n in range(blocks)]
            layers.append(nn.Sequential(*made))
            before = 4 * width
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, 1000)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.pool(F.relu(self.bn1(self.conv1(pictures)))))
        scores: torch.Tensor = self.classifier(hidden.mean((2, 3)))
        return scores


class Recommender(nn.Module):
    """A large embedding and a small network on the mean of what a user has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(300_000, 256)
        self.network = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
        )
        self.scores = nn.Linear(512, 2000)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = self.scores(self.network(self.items(seen).mean(1)))
        return scored


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its loss and two batches."""

    model: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batches: Callable[[], list[Batch]]

    def job(self) -> Job:
        """A job that trains it with AdamW."""
        torch.manual_seed(0)
        return Job(
            model=self.model(),
            loss=self.loss,
            train_data=self.batches(),
            optimizer=partial(torch.optim.AdamW, lr=1e-4),
        )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertForMaskedLM(BertConfig())  # type: ignore[no-untyped-call]

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.bert(tokens).logits
            return scores

    return Scores()


def _tokens(vocabulary: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, _BATCH, _TOKENS + 1), generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def _pictures() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn((2, 8, 3, 128, 128), generator=generator)
    return list(zip(pictures, torch.randint(1000, (2, 8), generator=generator), strict=True))


def _seen() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    seen = torch.randint(300_000, (2, 64, 20), generator=generator)
    return list(zip(seen, torch.randint(2000, (2, 64), generator=generator), strict=True))


def _gpt2(tied: bool) -> Case:
    size: GPTSize = GPT2
    return Case(partial(GPT, size, tied=tied), next_token_loss, partial(_tokens, size.vocabulary))


CASES: Mapping[str, Case] = {
    "GPT-2, tied": _gpt2(True),
    "GPT-2, untied": _gpt2(False),
    "BERT": Case(_bert, next_token_loss, partial(_tokens, 30_522)),
    "ResNet-50": Case(ResNet50, F.cross_entropy, _pictures),
    "recommender": Case(Recommender, F.cross_entropy, _seen),
}
