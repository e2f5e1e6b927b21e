"""Ravnest on the hosts of a lab: `ravnest serve` on the host `home`, and `ravnest join` on every other host."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ravnest.monitor.events import read_events
from ravnest.net.identity.swarm_invite import SwarmInvite
from tests.e2e.command import Running, ravnest
from tests.known_speed import speed_is_known
from tests.wan import Lab


class Internet:
    """The hosts of a lab, and the commands that run on them until the exit stack closes."""

    def __init__(self, lab: Lab, providers: Sequence[str], folder: Path, stack: ExitStack) -> None:
        self.lab = lab
        self.folder = folder
        self._providers = providers
        self._stack = stack

    def train(self, job: str) -> tuple[Running, list[Running]]:
        """Starts one cluster of all providers; `job` is the text of the job file. Returns the running commands."""
        home = self.lab.host("home")
        (self.folder / "job.py").write_text(job)
        size = ("--providers", str(len(self._providers)), "--clusters", "1")
        words = ("serve", "job.py", "--listen", f"{home.address}:7700", *size, "--run", "run")
        serving = self._stack.enter_context(Running(*words, folder=self.folder, on=home.command, warm=True))
        assert serving.process.stdout is not None
        line = serving.process.stdout.readline().decode()
        invite = SwarmInvite.parse(line.removeprefix("invite: ravnest join "))
        joined = []
        for name in self._providers:
            host = self.lab.host(name)
            data = {"XDG_DATA_HOME": str(self.folder / name), "XDG_CACHE_HOME": str(self.folder / name)}
            speed_is_known(self.folder / name)
            command = Running(
                "join", invite.line, "--name", name, folder=self.folder, on=host.command, warm=True, **data
            )
            joined.append(self._stack.enter_context(command))
        return serving, joined

    def summary(self) -> dict[str, Any]:
        shown = ravnest("status", "run", "--json", folder=self.folder)
        assert shown.returncode == 0, shown.stderr
        summary = json.loads(shown.stdout)
        assert isinstance(summary, dict)
        return summary

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder / "run/events.jsonl") if event["kind"] == kind]


def stages(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of the first cluster."""
    found = summary["clusters"][0]["stages"]
    assert isinstance(found, list)
    return found


def ended_well(running: Running) -> str:
    """Waits for the command, which must end without an error, and returns its output."""
    said = running.to_the_end()
    assert running.process.returncode == 0, said
    assert "Traceback" not in said, said
    return said
