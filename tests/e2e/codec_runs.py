"""Runs whose links have a codec, and what their summaries say about those links."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import accuracy

WIDTH, BATCH = 64, 32


def a_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3),
        )


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, BATCH, 8, generator=generator)
    return [(x, x[:, :3].argmax(dim=1)) for x in features]


def trained(swarm: EmbeddedSwarm, run: Path, **pipeline: Any) -> dict[str, Any]:
    job = Job(
        model=a_net(),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        train_data=batches(120, 1),
        eval_data=batches(10, 2),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        # What is rounded between stages depends on where they are cut, and the loss on what is rounded.
        pipeline=Pipeline(in_flight=1, cuts=("2", "4"), **pipeline),
    )
    swarm.train(job, providers=3, run=run, display=False)
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def links(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [link for stage in summary["clusters"][0]["stages"] for link in stage["links"]]
