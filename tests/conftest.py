"""What all tests share: one embedded swarm per worker, one thread for torch, one look at how fast the machine is."""

import gc
import logging
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings

from ravnest.coordinator.launch import provider_processes
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.plan import prepared_job as prepare
from ravnest.coordinator.plan.cost_cache import key_of
from ravnest.coordinator.run import context
from ravnest.engine.speed.device_speed import Speed
from ravnest.graph.capture.capture import Captured
from ravnest.graph.profile import CostProfile
from ravnest.graph.update_cost import UpdateCost
from ravnest.job import Job
from ravnest.spec import OptimizerSpec
from tests.order import arrange
from tests.swarms.embedded import SharedSwarm
from tests.warm import start_warm

# Two test workers and their providers share two cores; torch's own threads would only stand in one another's way.
torch.set_num_threads(1)

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# A suite that was started in the background ignores Ctrl-C and the end of its terminal, and so would all its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


def pytest_collection_finish() -> None:
    # What was imported and collected stays to the end: to look through it again and again took a tenth of all the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_machine() -> Iterator[None]:
    """What runs measure before they plan, of the machine and of a model on it, is measured once: it takes longer than
    what most of them train. Those measures have tests of their own, which call them where they are made."""
    speeds: dict[tuple[str, tuple[str, ...]], Speed] = {}
    updates: dict[tuple[str, int, int], UpdateCost] = {}
    models: dict[str, CostProfile] = {}
    measure_speed, time_update, measure_costs = prepare.measure_speed, prepare.time_update, prepare.measure_costs

    def speed(device: torch.device, *more: Any, halves: Sequence[str]) -> Speed:
        key = str(device), tuple(halves)
        if key not in speeds:
            speeds[key] = measure_speed(device, *more, halves=halves)
        return speeds[key]

    def update(optimizer: OptimizerSpec, accumulate: int, *timers: Any) -> UpdateCost:
        key = optimizer.to_json(), accumulate, torch.get_num_threads()
        if key not in updates:
            updates[key] = time_update(optimizer, accumulate, *timers)
        return updates[key]

    def costs(job: Job, captured: Captured) -> CostProfile:
        key = key_of(job, captured, torch.get_num_threads())
        if key not in models:
            models[key] = measure_costs(job, captured)
        return models[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "measure_speed", speed)
        patch.setattr(prepare, "time_update", update)
        patch.setattr(prepare, "measure_costs", costs)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_providers() -> Iterator[None]:
    """Providers of swarms that a test starts in its own process have their imports done (tests/warm.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_processes, "start_process", start_warm)
        yield


class _Collected(logging.Handler):
    """What is logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def impossible_phases_are_expected() -> None:
    """For a test that makes a run skip a phase on purpose."""


@pytest.fixture(autouse=True)
def phases_follow_the_state_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """No run in the process of the tests goes from a phase to one that cannot follow it."""
    collected, log = _Collected(), logging.getLogger(context.__name__)
    log.addHandler(collected)
    yield
    log.removeHandler(collected)
    assert not collected.lines or "impossible_phases_are_expected" in request.fixturenames, collected.lines


@pytest.fixture(scope="session")
def shared_swarm() -> Iterator[SharedSwarm]:
    shared = SharedSwarm()
    try:
        yield shared
    finally:
        shared.close()


@pytest.fixture
def swarm(shared_swarm: SharedSwarm) -> EmbeddedSwarm:
    """Four providers that train one job after another: `swarm.train(job, providers=k, run=path, display=False)`."""
    return shared_swarm.healthy()
