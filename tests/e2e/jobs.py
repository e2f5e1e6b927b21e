"""Small jobs and job files for the tests of the whole."""

import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ravnest import Checkpoint, Job, Pipeline

FEATURES, CLASSES, BATCH = 6, 3, 8

Batch = tuple[Any, Any]


class Net(nn.Module):
    """Three layers, so that up to three providers have one each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def a_net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def samples(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    return features, features[:, :CLASSES].argmax(dim=1)


def batches(sizes: Iterable[int] = (BATCH,) * 8, seed: int = 0) -> list[Batch]:
    sizes = list(sizes)
    features, labels = samples(sum(sizes), seed)
    return list(zip(features.split(sizes), labels.split(sizes), strict=True))


def a_job(train_data: Any = None, **changes: Any) -> Job:
    """A job with one microbatch in flight, so that it repeats exactly."""
    settings: dict[str, Any] = {
        "model": a_net(),
        "loss": F.cross_entropy,
        "train_data": batches() if train_data is None else train_data,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "pipeline": Pipeline(in_flight=1),
    }
    return Job(**{**settings, **changes})


def every_updates(count: int, keep: int = 2) -> Checkpoint:
    return Checkpoint(every_seconds=None, every_updates=count, keep=keep)


def a_job_file(folder: Path, *, before: str = "", data: str = "batches", **fields: str) -> Path:
    """A job file as a user writes it; `fields` replace the arguments of the Job by other source text."""
    arguments = {
        "model": "Net()",
        "loss": "F.cross_entropy",
        "train_data": data,
        "optimizer": "partial(torch.optim.SGD, lr=0.1)",
        **fields,
    }
    listed = "\n".join(f"    {name}={value}," for name, value in arguments.items())
    path = folder / "job.py"
    path.write_text(f"{_HEAD}\n{textwrap.dedent(before)}\n\njob = ravnest.Job(\n{listed}\n)\n")
    return path


_HEAD = """\
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ravnest

HERE = Path(__file__).parent


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


torch.manual_seed(0)
batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(8)]
"""
