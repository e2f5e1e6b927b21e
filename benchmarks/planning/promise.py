"""Predicted against measured rates of runs: swarms of unequal machines and lines in the WAN lab.

Each set-up is a real `ravnest serve` and real `ravnest join`s, each on a host of its own with its own line. All hosts
share this machine's cores, so machines become unequal by `--pretend-slower`, which computes and then waits: together
they leave the cores idle part of the time, as separate machines would. Both numbers come from the run's summary.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Row, say
from ravnest.monitor.events import read_events
from tests.e2e.command import Running
from tests.wan import Host, Lab
from tests.wan import Path as LabPath

_PATIENCE_SECONDS = 300.0

_JOB = """
import sys
from functools import partial

import torch

import ravnest

sys.path.insert(0, {root!r})
from benchmarks.models import (
    GPT, Convolutions, GPTSize, Repeated, next_token_loss, picture_batches, token_batches
)

torch.set_num_threads(1)
torch.manual_seed(0)
{model}
job = ravnest.Job(
    model=model,
    loss=loss,
    train_data=Repeated(batches, {steps}),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    checkpoint=ravnest.Checkpoint(every_seconds=None),
    pipeline=ravnest.Pipeline({pipeline}),
)
"""

GPT = """
size = GPTSize(layers=6, width=192, heads=4, vocabulary=1024, context=64)
model, loss, batches = GPT(size), next_token_loss, token_batches(size, 8)
"""

CNN = """
model, loss, batches = Convolutions(), torch.nn.functional.cross_entropy, picture_batches(16)
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """One provider: its slowdown against this machine, and its line."""

    slower: float
    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0
    """One way, to any other host."""
    nat: bool = False


@dataclass(frozen=True, slots=True)
class SetUp:
    """A swarm, and a job of `steps` microbatches for it."""

    title: str
    machines: tuple[Machine, ...]
    model: str = GPT
    steps: int = 100
    pipeline: str = ""


SET_UPS = (
    SetUp("GPT, 3 machines of 2:3:4, fast lines", (Machine(4), Machine(6), Machine(8))),
    SetUp(
        "GPT, 3 unequal machines, 100 Mbit/s, 60-100 ms",
        (Machine(8, 100, 100, 10), Machine(4, 100, 100, 20), Machine(6, 100, 100, 30)),
    ),
    SetUp("GPT, 2 machines, 10 Mbit/s up, 40 down, 40 ms", (Machine(4, 10, 40, 10), Machine(6, 10, 40, 10))),
    SetUp(
        "GPT, 4 unequal machines on unequal lines",
        (Machine(6, 20, 100, 15), Machine(10, 100, 100, 5), Machine(8, 40, 50, 25), Machine(12, 500, 500, 5)),
    ),
    SetUp(
        "GPT, 3 machines, two behind routers, 50 Mbit/s",
        (Machine(6, 50, 50, 10, nat=True), Machine(8, 50, 50, 15, nat=True), Machine(6, 50, 50, 5)),
    ),
    SetUp(
        "GPT, 3 machines, 150 ms, staleness at most 2",
        (Machine(4, 100, 100, 37), Machine(4, 100, 100, 38), Machine(6, 100, 100, 37)),
        pipeline="max_staleness=2",
    ),
    SetUp(
        "CNN, 4 unequal machines, 100 Mbit/s, 20 ms",
        (Machine(12, 100, 100, 5), Machine(8, 100, 100, 5), Machine(16, 100, 100, 5), Machine(10, 100, 100, 5)),
        model=CNN,
    ),
    SetUp("CNN, 2 machines of 1:2, 30 Mbit/s, 30 ms", (Machine(6, 30, 30, 7), Machine(12, 30, 30, 8)), model=CNN),
)


def measured(set_up: SetUp) -> Row:
    """Trains in the lab; the predicted and the measured rate."""
    with tempfile.TemporaryDirectory() as name, _lab(set_up) as lab, ExitStack() as stack:
        folder = Path(name)
        job = _JOB.format(root=str(ROOT), model=set_up.model, steps=set_up.steps, pipeline=set_up.pipeline)
        (folder / "job.py").write_text(job)

        def start(host: str, *words: str) -> Running:
            data = str(folder / host)
            running = Running(
                *words,
                folder=folder,
                on=lab.host(host).command,
                PYTHONPATH=str(ROOT),
                XDG_DATA_HOME=data,
                XDG_CACHE_HOME=data,
            )
            running.patience_seconds = _PATIENCE_SECONDS
            return stack.enter_context(running)

        listen, count = f"{lab.host('home').address}:7700", str(len(set_up.machines))
        serving = start(
            "home", "serve", "job.py", "--listen", listen, "--providers", count, "--clusters", "1", "--run", "run"
        )
        assert serving.process.stdout is not None
        invite = serving.process.stdout.readline().decode().removeprefix("invite: ravnest join ").strip()
        joined = []
        for number, machine in enumerate(set_up.machines):
            # One after another, as people come: each measures itself while no other is starting.
            slower = ("--pretend-slower", str(machine.slower))
            joined.append(start(f"p{number}", "join", invite, "--name", f"p{number}", *slower))
            serving.until(f"p{number} joined with")
        said = serving.to_the_end()
        for running in joined:
            running.to_the_end()
        assert serving.process.returncode == 0, said
        summary = json.loads((folder / "run/summary.json").read_text())
        planned = next(event for event in read_events(folder / "run/events.jsonl") if event["kind"] == "planned")
    return row_of(set_up, summary, planned["reason"])


def row_of(set_up: SetUp, summary: dict[str, Any], reason: str) -> Row:
    promised, came = summary["predicted_samples_per_second"], summary["samples_per_second"]
    off = promised / came - 1
    say(f"{set_up.title}: promised {promised:.1f}, measured {came:.1f} samples/s, {100 * off:+.1f} % ({reason})")
    return {
        "case": set_up.title,
        "predicted_samples_per_second": promised,
        "measured_samples_per_second": came,
        "off": off,
    }


@contextmanager
def _lab(set_up: SetUp) -> Iterator[Lab]:
    hosts = [Host("home")]
    delays = {"home": 0.0}
    for number, machine in enumerate(set_up.machines):
        hosts.append(Host(f"p{number}", up_mbps=machine.up_mbps, down_mbps=machine.down_mbps, nat=machine.nat))
        delays[f"p{number}"] = machine.delay_ms
    paths = {(a, b): LabPath(delay_ms=delays[a] + delays[b]) for a in delays for b in delays if a != b}
    with Lab(hosts, paths=paths) as lab:
        yield lab
