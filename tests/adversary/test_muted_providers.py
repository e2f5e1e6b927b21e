"""A provider that only says that it does its part, over real processes: it is named, or given up for what it claims."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ravnest import Checkpoint, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.monitor.events import read_events
from tests.e2e.jobs import a_job, batches, every_updates
from tests.e2e.watching import PATIENCE_SECONDS, adds_up, endless, wait_for
from tests.swarms.embedded import impostor, kill

pytestmark = pytest.mark.timeout(180)


def muted_swarm(count: int, muted: str, **how: str) -> EmbeddedSwarm:
    """A swarm in which this provider is muted."""
    return EmbeddedSwarm(count, start=impostor(muted, Path(__file__).with_name("muted_provider.py"), **how))


def trained(
    swarm: EmbeddedSwarm,
    run: Path,
    providers: int,
    watch: Callable[[], None],
    checkpoint: Checkpoint,
    updates: int | None = None,
) -> tuple[TrainResult, list[dict[str, Any]]]:
    """Trains until `watch` has seen enough, on a thread of its own, or for this many updates; what the run told."""
    ended = threading.Event()

    def watching_it() -> None:
        try:
            watch()
        finally:
            ended.set()

    thread = threading.Thread(target=watching_it)
    thread.start()
    try:
        job = a_job(endless(ended), pipeline=Pipeline(), checkpoint=checkpoint, max_updates=updates)
        result = swarm.train(job, providers=providers, clusters=1, run=run, display=False)
    finally:
        thread.join(PATIENCE_SECONDS)
    return result, list(read_events(run / "events.jsonl"))


def of_kind(told: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in told if event["kind"] == kind]


def test_a_stage_that_claims_to_upload_and_uploads_nothing_is_given_up_for_that(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def watch() -> None:
        for kind in ("lost", "failover"):
            wait_for(run, kind)

    with muted_swarm(3, "provider-0", RAVNEST_MUTE="upload", RAVNEST_FROM="41") as swarm:
        # So that all three are there: else the one that joins last stands by.
        swarm.train(a_job(batches()), providers=3, run=tmp_path / "before", display=False)
        # Before the end, checkpoints are replicas, and another provider has each part as well. There is one of the end.
        result, told = trained(swarm, run, 2, watch, every_updates(40), updates=40)
    assert adds_up(result, result.summary.ledger.fed) and result.model is not None
    [lost] = of_kind(told, "lost")
    assert lost["provider"] == "provider-0", lost
    assert lost["reason"].startswith("its state was asked for 1"), lost
    assert "nothing has arrived for 1" in lost["reason"] and "a standby is ready" in lost["reason"], lost
    assert lost["at"] - of_kind(told, "first_update")[0]["at"] < 45.0, "in bounded time, whatever it says"


def test_a_stage_that_sends_nothing_on_is_named_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with muted_swarm(2, "provider-0", RAVNEST_MUTE="forward", RAVNEST_FROM="12") as swarm:

        def watch() -> None:
            wait_for(run, "standstill")
            kill(swarm, "provider-0")

        result, told = trained(swarm, run, 2, watch, every_updates(100_000))
    assert adds_up(result, result.summary.ledger.fed), "the run goes on without it"
    [standstill] = of_kind(told, "standstill")
    assert set(standstill["waits_for"]) == {"provider-0", "provider-1"}, standstill
    assert "provider-0) waits for the gradient of microbatch 12 from stage 1 (provider-1)" in standstill["reason"]
    assert "one of the two does not do its part, or nothing passes between them" in standstill["reason"], standstill
    [went_on] = of_kind(told, "went_on")
    assert went_on["at"] > standstill["at"] and went_on["reason"].startswith("went on after")
