"""The processes of an embedded swarm, for tests that kill them, stop them, or look at what they use."""

import psutil

from ravnest.coordinator.launch.embedded import EmbeddedSwarm


def providers_of(swarm: EmbeddedSwarm) -> list[psutil.Process]:
    """Those that are there: provider-0, provider-1 and so on."""
    return [psutil.Process(pid) for pid in swarm._processes.pids if psutil.pid_exists(pid)]
