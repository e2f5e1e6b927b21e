"""Scenes with scripted providers: fixtures for tests of losses and takeovers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from ravnest import Pipeline
from ravnest.coordinator.health import watchdog as watching
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.coordinator.recovery import standbys
from ravnest.coordinator.replicas import tracker as replicas
from ravnest.coordinator.run.timeouts import Timeouts
from tests.e2e.jobs import a_job, every_updates
from tests.swarms.scripted import TIMEOUTS, Play, Run


@pytest.fixture(scope="session")
def prepared() -> PreparedJob:
    """The job of all scenes, captured once."""
    job = a_job(pipeline=Pipeline(in_flight=4), checkpoint=every_updates(1000))
    return prepare(job, 1, None, lambda phase: None)


@pytest.fixture
def play(prepared: PreparedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Plays a scene with a run of its own."""

    runs: list[Run] = []

    async def watch_nothing(watch: object) -> None:
        # Scripted providers have no links: each would count as silent.
        await asyncio.Event().wait()

    monkeypatch.setattr(watching.Watchdog, "run", watch_nothing)
    monkeypatch.setattr(standbys, "is_well", lambda members, node_id: members.is_present(node_id))

    def play(
        scene: Callable[[Run], Awaitable[None]],
        seed: int = 0,
        of: PreparedJob = prepared,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        async def played() -> None:
            runs.append(Run(of, tmp_path / f"run{len(runs)}", seed, timeouts))
            async with runs[-1] as run:
                await scene(run)

        asyncio.run(played())

    yield play


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is due whenever there is something new."""
    monkeypatch.setattr(replicas, "replica_due", lambda **seen: (seen["updates_since"] > 0, "often"))
