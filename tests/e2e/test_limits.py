"""Limits of a machine that a run meets: it goes on, or says why not. A clock that is set, memory that runs out."""

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest import Job, Pipeline, TrainingError
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from tests.e2e.jobs import Batch, a_job, batches, every_updates
from tests.swarms.embedded import providers_of

DAY_SECONDS = 86400.0


@pytest.mark.parametrize("jump", [DAY_SECONDS, -DAY_SECONDS])
def test_a_clock_that_is_set_by_a_day_while_a_run_goes_on_is_not_noticed(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    real = time.time

    def data() -> Iterator[Batch]:
        for number, batch in enumerate(batches([8] * 12)):
            if number == 6:
                monkeypatch.setattr(time, "time", lambda: real() + jump)
            yield batch

    job = a_job(data, checkpoint=every_updates(4))
    summary = swarm.train(job, providers=2, run=tmp_path / "run", display=False).summary
    assert (summary.status, summary.updates, summary.faults) == ("finished", 12, ())
    assert 0 < summary.seconds < 600
    events = read_events(tmp_path / "run/events.jsonl")
    elapsed = [event["elapsed"] for event in events]
    assert elapsed == sorted(elapsed) and elapsed[-1] < 600
    assert abs(events[-1]["at"] - events[0]["at"] - jump) < 600, "the clock was set while it ran"
    assert {"lost", "disconnected", "checkpoint_damaged"}.isdisjoint(event["kind"] for event in events)


def test_a_provider_without_the_memory_that_it_said_is_evicted_with_the_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))
    with EmbeddedSwarm(2) as own:
        victims = providers_of(own)

        def data() -> Iterator[Batch]:
            for number in range(200):
                # Once, though the data may be walked again: nobody gets more than it was left with.
                while number == 3 and victims:
                    victim = victims.pop()
                    held = victim.memory_info().vms
                    resource.prlimit(victim.pid, resource.RLIMIT_AS, (held + (16 << 20), held + (16 << 20)))
                # 128 MiB of activations in the middle.
                yield torch.randn(8192, 64), torch.randint(0, 8, (8192,))
                threading.Event().wait(0.05)

        job = Job(
            model=model,
            loss=F.cross_entropy,
            train_data=data,
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            pipeline=Pipeline(in_flight=2),
        )
        with contextlib.suppress(TrainingError):
            own.train(job, run=tmp_path / "run", display=False)
    events = read_events(tmp_path / "run/events.jsonl")
    failed = [event for event in events if event["kind"] == "stage_failed" and event["failure"] == "memory"]
    evicted = [event for event in events if event["kind"] == "evicted"]
    assert failed and failed[0]["reason"].startswith("memory ran out"), [e["reason"] for e in events]
    assert evicted and evicted[0]["provider"] == failed[0]["provider"]
    assert "reported" in evicted[0]["reason"] and evicted[0]["memory_bytes"] > 0
