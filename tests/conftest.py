"""What all tests share: one embedded swarm per worker, and one thread for torch."""

from collections.abc import Iterator

import psutil
import pytest
import torch

from ravnest.coordinator.embedded import EmbeddedSwarm

PROVIDERS = 4

# Two test workers and their providers share two cores; torch's own threads would only stand in one another's way.
torch.set_num_threads(1)


class SharedSwarm:
    """An embedded swarm that starts when it is first asked for, and is replaced when a test has lost a provider.

    Providers end with the pipe to this process, so none is left behind even when the worker itself is killed.
    """

    def __init__(self) -> None:
        self._swarm: EmbeddedSwarm | None = None
        self._providers: list[psutil.Process] = []

    def healthy(self) -> EmbeddedSwarm:
        if self._swarm is not None and not all(_is_running(p) for p in self._providers):
            self.close()
        if self._swarm is None:
            before = set(psutil.Process().children())
            self._swarm = EmbeddedSwarm(PROVIDERS)
            self._providers = [p for p in psutil.Process().children() if p not in before]
        return self._swarm

    def close(self) -> None:
        if self._swarm is not None:
            self._swarm.__exit__(None, None, None)
        left = [p for p in self._providers if _is_running(p)]
        self._swarm, self._providers = None, []
        for provider in left:
            provider.kill()
        assert not left, f"{len(left)} providers outlived their swarm"


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


def _is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
