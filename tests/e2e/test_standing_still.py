"""A run in which nothing is completed says why, while it lasts, and that it went on; real processes."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from tests.e2e.command import ravnest
from tests.e2e.jobs import Batch, a_job, batches, every_updates
from tests.swarms.embedded import providers_of

pytestmark = pytest.mark.timeout(180)

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def two() -> Iterator[EmbeddedSwarm]:
    with EmbeddedSwarm(2) as swarm:
        yield swarm


def told(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def test_a_data_loader_that_blocks_is_what_the_run_says_that_it_waits_for(two: EmbeddedSwarm, tmp_path: Path) -> None:
    run, shown = tmp_path / "run", []

    def data() -> Iterator[Batch]:
        yield from batches()
        until(lambda: bool(told(run, "standstill")))
        # The summary is written every two seconds.
        until(lambda: json.loads((run / "summary.json").read_text())["standstill"] != "")
        shown.append(ravnest("status", run, folder=tmp_path).stdout)
        yield from batches()

    result = two.train(a_job(data), providers=2, run=run, display=False)
    assert result.summary.ledger.completed == 16 and result.summary.standstill == ""
    [standstill] = told(run, "standstill")
    assert "the data loader has not yielded a batch for 1" in standstill["reason"], standstill
    assert standstill["reason"].startswith("nothing completed for 1") and standstill["waits_for"] == []
    assert "nothing completed for 1" in shown[0] and "the data loader has not yielded" in shown[0]
    [went_on] = told(run, "went_on")
    assert went_on["seconds"] >= standstill["seconds"]


def test_a_provider_that_is_stopped_is_what_the_others_are_said_to_wait_for(two: EmbeddedSwarm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    victim = providers_of(two)[1]

    def data() -> Iterator[Batch]:
        yield from batches()
        victim.send_signal(signal.SIGSTOP)
        threading.Thread(target=go_on, daemon=True).start()
        yield from batches([8] * 16)

    def go_on() -> None:
        try:
            until(lambda: bool(told(run, "standstill")))
        finally:
            victim.send_signal(signal.SIGCONT)

    try:
        result = two.train(a_job(data, checkpoint=every_updates(1000)), providers=2, run=run, display=False)
    finally:
        victim.send_signal(signal.SIGCONT)
    assert result.summary.ledger.completed == 24
    [standstill] = told(run, "standstill")
    assert standstill["waits_for"] == ["provider-1"], standstill
    assert "(provider-1), which has not been heard for" in standstill["reason"], standstill
    assert told(run, "went_on")
