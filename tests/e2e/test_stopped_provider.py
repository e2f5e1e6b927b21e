"""A provider of the embedded swarm that is stopped, or becomes slow, is done without, and takes part again."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ravnest.coordinator.health import slow_stages
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from tests.e2e.jobs import Batch, a_job, batches, every_updates
from tests.swarms.embedded import providers_of

pytestmark = pytest.mark.timeout(180)


def test_a_stopped_provider_is_lost_and_joins_again_when_it_goes_on(tmp_path: Path) -> None:
    def events(kind: str, provider: str = "") -> list[dict[str, Any]]:
        found = read_events(tmp_path / "run/events.jsonl")
        return [e for e in found if e["kind"] == kind and provider in ("", e.get("provider"))]

    def until(condition: Any) -> Iterator[Batch]:
        """Data for as long as the condition does not hold."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, [
                (e["kind"], e["reason"]) for e in read_events(tmp_path / "run/events.jsonl")
            ]
            yield from batches([8])
            threading.Event().wait(0.05)

    with EmbeddedSwarm(3) as own:
        victim = providers_of(own)[1]

        def stopping() -> Iterator[Batch]:
            # Not a checkpoint: to go back to one, the data would have to be walked again.
            yield from until(lambda: events("replica"))
            victim.send_signal(signal.SIGSTOP)
            yield from until(lambda: events("lost", "provider-1"))
            yield from until(lambda: events("reformed") or events("failover"))
            victim.send_signal(signal.SIGCONT)
            yield from until(lambda: len(events("joined", "provider-1")) == 2)

        job = a_job(stopping, checkpoint=every_updates(100_000))
        try:
            result = own.train(job, providers=3, clusters=1, run=tmp_path / "run", display=False)
        finally:
            victim.send_signal(signal.SIGCONT)
        assert victim.is_running()
    ledger = result.summary.ledger
    assert (ledger.fed, ledger.lost, ledger.applied_twice) == (ledger.completed, 0, 0)
    [lost] = events("lost", "provider-1")
    assert "nothing received for" in lost["reason"]
    assert events("suspected", "provider-1")


def test_a_provider_that_becomes_slow_is_done_without_where_another_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_stages, "WINDOW_SECONDS", 0.3)
    monkeypatch.setattr(slow_stages, "LASTING_SECONDS", 2.0)
    over = threading.Event()
    victims: list[str] = []

    def batch() -> Batch:
        return torch.randn(64, 512), torch.randint(512, (64,))

    def hinder(process: psutil.Process) -> None:
        """It gets a twentieth of its time, however late this thread is on a busy machine: much less than others have
        left there. Never stopped for long enough to be taken for a silent one."""
        ran = 0.004
        while not over.is_set():
            process.send_signal(signal.SIGSTOP)
            over.wait(min(19 * ran, 0.8))
            process.send_signal(signal.SIGCONT)
            went_on = time.monotonic()
            over.wait(0.004)
            ran = time.monotonic() - went_on

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(tmp_path / "run/events.jsonl") if event["kind"] == kind]

    def trained(figure: str) -> list[Any]:
        """Of each stage, as the summary has it; nothing while there is none."""
        path = tmp_path / "run/summary.json"
        clusters = json.loads(path.read_text())["clusters"] if path.exists() else []
        return [stage[figure] for cluster in clusters for stage in cluster["stages"]]

    def data() -> Iterator[Batch]:
        began = time.monotonic()
        while time.monotonic() - began < 3 or not events("replica") or not trained("updates"):
            yield batch()
            threading.Event().wait(0.02)
        # Who was the last to join stands by, and whoever that is.
        victims.append(trained("provider")[-1])
        victim = own[int(victims[0].removeprefix("provider-"))]
        hindering = threading.Thread(target=hinder, args=[victim])
        hindering.start()
        try:
            deadline = time.monotonic() + 100
            while not events("failover"):
                assert time.monotonic() < deadline, [(e["kind"], e["reason"]) for e in events("lost")]
                yield batch()
        finally:
            over.set()
            hindering.join()
        for _ in range(20):
            yield batch()

    with EmbeddedSwarm(3) as swarm:
        own = providers_of(swarm)
        # Some milliseconds for a microbatch: of less, most of what hinders a machine falls between two of them.
        layers = [nn.Linear(512, 512) for _ in range(12)]
        job = a_job(data, model=nn.Sequential(*layers), checkpoint=every_updates(100_000))
        result = swarm.train(job, providers=2, clusters=1, run=tmp_path / "run", display=False)
    ledger = result.summary.ledger
    assert (ledger.fed, ledger.lost, ledger.applied_twice) == (ledger.completed, 0, 0)
    [lost] = events("lost")
    assert [lost["provider"]] == victims and "for a microbatch" in lost["reason"] and "(usually " in lost["reason"]
    assert "in its place there would be" in lost["reason"]
