"""Embedded swarms for tests: one that is shared, ones with spare providers, and providers that are other programs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.provider_processes import Start
from tests.warm import start_warm

PROVIDERS = 4
"""Providers of the shared swarm."""


def providers_of(swarm: EmbeddedSwarm) -> list[psutil.Process]:
    """The running processes of provider-0, provider-1 and so on."""
    return [psutil.Process(pid) for pid in swarm.processes.values()]


def kill(swarm: EmbeddedSwarm, *names: str) -> None:
    """Ends these providers with SIGKILL."""
    running = swarm.processes
    for name in names:
        os.kill(running[name], signal.SIGKILL)


def impostor(name: str, program: Path, **variables: str) -> Start:
    """Starts this provider as another program with these environment variables, and every other one as usual."""

    def start(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        if name not in command:
            return start_warm(command, environment)
        # In place of `-m ravnest`.
        command = [sys.executable, str(program), *command[3:]]
        return start_warm(command, {**environment, **variables, "PYTHONPATH": ":".join(sys.path)})

    return start


class SharedSwarm:
    """An embedded swarm that starts when a test first asks for it, and is replaced after a test has lost a provider.

    Providers end with the pipe to this process, so that none is left even when the test worker is killed.
    """

    def __init__(self, providers: int = PROVIDERS) -> None:
        self._providers = providers
        self._swarm: EmbeddedSwarm | None = None
        self._processes: list[psutil.Process] = []

    def healthy(self) -> EmbeddedSwarm:
        """The swarm, with all of its providers."""
        return self.with_providers(self._providers)

    def with_providers(self, needed: int, *, exactly: bool = False) -> EmbeddedSwarm:
        """The swarm with at least this many providers left; `exactly` kills the others. A new one has all of them."""
        if self._swarm is not None and len(self._swarm.processes) < needed:
            self.close()
        if self._swarm is None:
            self._swarm = EmbeddedSwarm(self._providers)
            self._processes = providers_of(self._swarm)
        if exactly:
            kill(self._swarm, *sorted(self._swarm.processes)[needed:])
        return self._swarm

    def close(self) -> None:
        """Ends the swarm. Fails when a provider outlives it."""
        if self._swarm is not None:
            self._swarm.__exit__(None, None, None)
        left = [process for process in self._processes if _is_running(process)]
        self._swarm, self._processes = None, []
        for process in left:
            process.kill()
        assert not left, f"{len(left)} providers outlived their swarm"


def _is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
