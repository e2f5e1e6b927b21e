"""Jobs for the comparison with a plain loop: both train the same model with the same data and optimizer."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

import ravnest
from benchmarks.models import GPT, GPT2, SMALL, Repeated, next_token_loss, token_batches
from benchmarks.report import ROOT
from ravnest.jobfile import load_job


@dataclass(frozen=True, slots=True)
class Case:
    """A job of `steps` microbatches, made by `job(steps)`, with the loop to compare it with and the target ratio."""

    title: str
    job: Callable[[int], ravnest.Job]
    providers: int
    plain_threads: int
    steps: int
    quick_steps: int
    ratio: float
    device: str = "cpu"


def digits(steps: int) -> ravnest.Job:
    """The network of examples/digits on its own data, in prepared batches of 64."""
    example = load_job(str(ROOT / "examples/digits/job.py"))
    return _job(example.model, example.loss, list(islice(example.train_batches(), 22)), steps, example.optimizer)


def gpt(steps: int) -> ravnest.Job:
    """A GPT of 10 million parameters, batches of 4 sequences of 128 tokens."""
    torch.manual_seed(0)
    return _job(GPT(SMALL), next_token_loss, token_batches(SMALL, 4), steps, partial(torch.optim.AdamW, lr=3e-4))


def gpt2(steps: int, precision: str = "float32") -> ravnest.Job:
    """A GPT of 124 million parameters, batches of 8 sequences of 512 tokens."""
    torch.manual_seed(0)
    optimizer = partial(torch.optim.AdamW, lr=3e-4)
    return _job(GPT(GPT2, tied=True), next_token_loss, token_batches(GPT2, 8), steps, optimizer, precision)


def _job(
    model: torch.nn.Module, loss: Any, batches: list[Any], steps: int, optimizer: Any, precision: str = "float32"
) -> ravnest.Job:
    return ravnest.Job(
        model=model,
        loss=loss,
        train_data=Repeated([(inputs, targets) for inputs, targets in batches], steps),
        optimizer=optimizer,
        checkpoint=ravnest.Checkpoint(every_seconds=None),
        pipeline=ravnest.Pipeline(precision=precision),
    )


_CORES = os.cpu_count() or 1

CASES = {
    "digits-3": Case(
        title="digits CNN, 3 providers vs 1 plain thread",
        job=digits,
        providers=3,
        plain_threads=1,
        steps=1500,
        quick_steps=500,
        ratio=0.25,
    ),
    "gpt-1": Case(
        title=f"GPT 10M, 1 provider vs plain, {_CORES} threads each",
        job=gpt,
        providers=1,
        plain_threads=_CORES,
        steps=40,
        quick_steps=12,
        ratio=0.95,
    ),
    "gpt-2": Case(
        title="GPT 10M, 2 providers of 1 thread vs 1 plain thread",
        job=gpt,
        providers=2,
        plain_threads=1,
        steps=40,
        quick_steps=12,
        ratio=1.6,
    ),
}

GPU_CASES = {
    "gpt2-gpu": Case(
        title="GPT 124M, 1 provider on a GPU vs plain",
        job=gpt2,
        providers=1,
        plain_threads=1,
        steps=60,
        quick_steps=20,
        ratio=0.9,
        device="cuda:0",
    ),
    "gpt2-gpu-bf16": Case(
        title="GPT 124M, 1 provider on a GPU vs plain, both bfloat16",
        job=partial(gpt2, precision="bfloat16"),
        providers=1,
        plain_threads=1,
        steps=150,
        quick_steps=50,
        ratio=0.9,
        device="cuda:0",
    ),
}
"""Cases that need a GPU; left out on other machines."""
