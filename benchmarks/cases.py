"""The jobs whose speed is compared with a plain loop: the same model, data and optimizer for both."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

import ravnest
from benchmarks.models import GPT, SMALL, Repeated, next_token_loss, token_batches
from benchmarks.report import ROOT
from ravnest.jobfile import load_job


@dataclass(frozen=True, slots=True)
class Case:
    """A job of `steps` microbatches, made by `job(steps)`; what it is compared with, and the ratio promised."""

    title: str
    job: Callable[[int], ravnest.Job]
    providers: int
    plain_threads: int
    steps: int
    quick_steps: int
    ratio: float


def digits(steps: int) -> ravnest.Job:
    """The network of examples/digits on its own data, batches of 64 made beforehand."""
    example = load_job(str(ROOT / "examples/digits/job.py"))
    return _job(example.model, example.loss, list(islice(example.train_batches(), 22)), steps, example.optimizer)


def gpt(steps: int) -> ravnest.Job:
    """A GPT of 10 million parameters, batches of 4 sequences of 128 tokens."""
    torch.manual_seed(0)
    return _job(GPT(SMALL), next_token_loss, token_batches(SMALL, 4), steps, partial(torch.optim.AdamW, lr=3e-4))


def _job(model: torch.nn.Module, loss: Any, batches: list[Any], steps: int, optimizer: Any) -> ravnest.Job:
    return ravnest.Job(
        model=model,
        loss=loss,
        train_data=Repeated([(inputs, targets) for inputs, targets in batches], steps),
        optimizer=optimizer,
        checkpoint=ravnest.Checkpoint(every_seconds=None),
    )


_CORES = os.cpu_count() or 1

CASES = {
    "digits-3": Case(
        title="digits CNN, batch 64: 3 providers, plain with 1 thread",
        job=digits,
        providers=3,
        plain_threads=1,
        steps=1500,
        quick_steps=500,
        ratio=0.25,
    ),
    "gpt-1": Case(
        title=f"GPT 10M: 1 provider and plain with {_CORES} threads each",
        job=gpt,
        providers=1,
        plain_threads=_CORES,
        steps=40,
        quick_steps=12,
        ratio=0.9,
    ),
    "gpt-2": Case(
        title="GPT 10M: 2 providers with 1 thread each, plain with 1 thread",
        job=gpt,
        providers=2,
        plain_threads=1,
        steps=40,
        quick_steps=12,
        ratio=1.6,
    ),
}
