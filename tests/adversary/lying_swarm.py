"""An embedded swarm in which one provider lies: real processes, and real lines between them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ravnest.coordinator.launch import provider_processes as processes
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events

START, PROGRAM = subprocess.Popen, Path(__file__).with_name("lying_neighbour.py")


class LyingSwarm(EmbeddedSwarm):
    """Providers of which one tells this lie, from a microbatch on."""

    def __init__(self, providers: int, liar: str, lie: str, first: int = 0) -> None:
        self._liar, self._lie, self._first = liar, lie, first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes.subprocess, "Popen", self._start)
            super().__init__(providers)

    def _start(self, command: list[str], **more: Any) -> "subprocess.Popen[bytes]":
        environment = {**more.pop("env"), "PYTHONPATH": ":".join(sys.path)}
        if self._liar in command:
            # In place of `-m ravnest`.
            command = [sys.executable, str(PROGRAM), *command[3:]]
            environment |= {"RAVNEST_LIE": self._lie, "RAVNEST_LIE_FROM": str(self._first)}
        return START(command, env=environment, **more)


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] in kinds]
