"""Training run of several clusters in the WAN lab, with and without rounds, to see whether averaging slows training.

It runs `ravnest serve --clusters` and `ravnest join` processes, each on a host with a link of its own. All hosts share
this machine's cores, so `--pretend-slower` makes each provider compute and then wait; together they leave the cores
idle part of the time, as separate machines would.
"""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, say
from tests.e2e.command import Running
from tests.wan import Host, Lab
from tests.wan import Path as LabPath

_PATIENCE_SECONDS = 300.0
_BATCH = 8
_NEVER = 10**9

_JOB = """
import sys
from functools import partial

import torch

import ravnest

sys.path.insert(0, {root!r})
from benchmarks.models import GPT, GPTSize, Repeated, next_token_loss, token_batches

torch.set_num_threads(1)
torch.manual_seed(0)
size = GPTSize(layers=6, width=192, heads=4, vocabulary=1024, context=64)
job = ravnest.Job(
    model=GPT(size),
    loss=next_token_loss,
    train_data=Repeated(token_batches(size, {batch}), {steps}),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    checkpoint=ravnest.Checkpoint(every_seconds=None),
    averaging=ravnest.Averaging(every={every}),
)
"""


@dataclass(frozen=True, slots=True)
class Training:
    """A swarm of `clusters` times `stages` providers, and a job of `steps` microbatches for it."""

    clusters: int = 2
    stages: int = 2
    steps: int = 320
    slower: float = 8.0
    line_mbps: float = 100.0
    round_trip_ms: float = 20.0
    updates: int = 20
    """Updates of each cluster between two rounds."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a run."""

    samples_per_second: float
    rounds: int
    round_seconds: float


def trained(training: Training, averaging: bool) -> Trained:
    """Train in the lab, with rounds of averaging or with the final one only."""
    every = training.updates * _BATCH * training.clusters if averaging else _NEVER
    with tempfile.TemporaryDirectory() as name, _lab(training) as lab, ExitStack() as stack:
        folder = Path(name)
        job = _JOB.format(root=str(ROOT), batch=_BATCH, steps=training.steps, every=every)
        (folder / "job.py").write_text(job)

        def start(host: str, *words: str) -> Running:
            data = str(folder / host)
            folders = {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": data, "XDG_CACHE_HOME": data}
            running = Running(*words, folder=folder, on=lab.host(host).command, warm=False, **folders)
            running.patience_seconds = _PATIENCE_SECONDS
            return stack.enter_context(running)

        count = training.clusters * training.stages
        listen = f"{lab.host('home').address}:7700"
        swarm = ("--providers", str(count), "--clusters", str(training.clusters))
        serving = start("home", "serve", "job.py", "--listen", listen, *swarm, "--run", "run")
        assert serving.process.stdout is not None
        invite = serving.process.stdout.readline().decode().removeprefix("invite: ravnest join ").strip()
        joined = []
        for number in range(count):
            # One after another: each measures its machine while no other is starting.
            slower = ("--pretend-slower", str(training.slower))
            joined.append(start(f"p{number}", "join", invite, "--name", f"p{number}", *slower))
            serving.until(f"p{number} joined with")
        said = serving.to_the_end()
        for running in joined:
            running.to_the_end()
        assert serving.process.returncode == 0, said
        summary: dict[str, Any] = json.loads((folder / "run/summary.json").read_text())
    assert len(summary["clusters"]) == training.clusters, f"{len(summary['clusters'])} clusters trained"
    rounds = summary["averaging"]
    result = Trained(summary["samples_per_second"], rounds["rounds"], rounds["seconds_mean"] or 0.0)
    say(
        f"training {'with' if averaging else 'without'} averaging: {result.samples_per_second:.1f} samples/s, "
        f"{result.rounds} rounds of {result.round_seconds:.2f} s, {rounds['skipped']} left out"
    )
    return result


def _lab(training: Training) -> Lab:
    count = training.clusters * training.stages
    rate = training.line_mbps
    hosts = [Host("home"), *(Host(f"p{number}", up_mbps=rate, down_mbps=rate) for number in range(count))]
    return Lab(hosts, default=LabPath(delay_ms=training.round_trip_ms / 2))
