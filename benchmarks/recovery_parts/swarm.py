"""Swarm in the WAN lab whose machines are killed: `ravnest serve` on one host, `ravnest join` on the others."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.recovery_parts.watching import Recovery, RunObserver
from benchmarks.report import ROOT
from tests.wan import Host, Lab
from tests.wan import Path as Way

MBPS: Final = 100.0
ROUND_TRIP_MS: Final = 50.0
PACE: Final = "0.01,0.02"
"""Seconds of a forward and a backward of any stage, so that the shared cores of this machine are not the limit."""

_START_SECONDS: Final = 180.0
_RECOVERY_SECONDS: Final = 120.0
_STANDBY_SECONDS: Final = 90.0
_PAUSE_SECONDS: Final = 5.0
"""About the time between two replicas."""


class RecoverySwarm:
    """A swarm within a `with` block: `stages` machines that train, and `spares` standbys."""

    def __init__(self, folder: Path, stages: int, spares: int) -> None:
        self.watch = RunObserver(folder / "run")
        self._folder = folder
        self._stages = stages
        self._names = [f"m{number}" for number in range(1, stages + spares + 1)]
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._undo = ExitStack()
        self._invite = ""
        self._chance = random.Random(1)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            hosts = [Host(name) for name in ("home", *self._names)]
            self._lab = undo.enter_context(Lab(hosts, default=Way(delay_ms=ROUND_TRIP_MS / 2, rate_mbps=MBPS)))
            shutil.copy(Path(__file__).with_name("job.py"), self._folder / "job.py")
            self._serve()
            for name in self._names:
                self._join(name)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The lab kills all processes on its hosts.
        self._undo.close()

    def wait_for_training(self) -> None:
        """Wait until every stage has made updates, and every spare machine is a standby."""
        self._wait(lambda: self._trains(0.0), _START_SECONDS, "the first update of every stage")
        self._wait_for_standbys(0.0, self._spares())

    def wait_for_warm(self, role: str) -> None:
        """Wait until a standby has the stage of that role, with the state of a replica taken after this call."""
        stage = self._holding(role)["stage"]
        self._wait(lambda: self._standby_of(stage), _STANDBY_SECONDS, f"a standby for the {role}")

    def warm_role(self) -> str:
        """The role of the stage that the only standby has."""
        [event] = self.watch.events(0.0, "standby")[-1:]
        last = len(self.watch.stages()) - 1
        return {0: "root", last: "leaf"}.get(event["for_stage"], "stem")

    def kill(self, role: str) -> Recovery:
        """Kill the machine that holds the stage of that role; returns the recovery, or TimeoutError if there is
        none."""
        stage = self._holding(role)
        process = self._processes[stage["provider"]]
        at = time.time()
        process.kill()
        process.wait()
        found: list[Recovery] = []

        def recovered() -> bool:
            found.extend(filter(None, [self.watch.recovery(role, stage["stage"], at)]))
            return bool(found)

        self._wait(recovered, _RECOVERY_SECONDS, f"an update after the {role} was killed")
        return found[0]

    def rejoin(self) -> None:
        """Restart the killed machine; returns when it is a standby with all artifacts."""
        since = time.time()
        ended = [name for name, process in self._processes.items() if name != "home" and process.poll() is not None]
        for name in ended:
            self._join(name)
        self._wait_for_standbys(since, ended)

    def settle(self) -> None:
        """Wait until a new summary shows that every stage trains and has a replica; then wait a moment, so that kills
        do not always follow a replica directly."""
        since = time.time()
        self._wait(lambda: self._trains(since), _RECOVERY_SECONDS, "an update of every stage")
        self._wait(lambda: self.watch.events(since, "replica"), _STANDBY_SECONDS, "a replica of all stages")
        time.sleep(self._chance.uniform(0.0, _PAUSE_SECONDS))

    def _spares(self) -> list[str]:
        holding = {stage["provider"] for stage in self.watch.stages()}
        return [name for name in self._names if name not in holding]

    def _wait_for_standbys(self, since: float, names: Sequence[str]) -> None:
        def ready() -> bool:
            return {event["provider"] for event in self.watch.events(since, "standby")} >= set(names)

        self._wait(ready, _STANDBY_SECONDS, f"{', '.join(names)} as standby")

    def _standby_of(self, stage: int) -> bool:
        latest = {event["provider"]: event["for_stage"] for event in self.watch.events(0.0, "standby")}
        spares = [name for name in self._spares() if self._processes[name].poll() is None]
        return any(latest.get(name) == stage for name in spares)

    def _trains(self, since: float) -> bool:
        stages = {stage["stage"] for stage in self.watch.stages()}
        return bool(stages) and stages <= {line["stage"] for line in self.watch.updates(since)}

    def _holding(self, role: str) -> dict[str, Any]:
        stages = self.watch.stages()
        # Two stages have no middle one; a single stage is both the first and the last.
        index = {"root": 0, "stem": len(stages) // 2, "leaf": -1}[role]
        return sorted(stages, key=lambda stage: int(stage["stage"]))[index]

    def _wait(self, until: Any, seconds: float, what: str) -> None:
        self.watch.wait(until, seconds, what, self._check)

    def _check(self) -> None:
        home = self._processes["home"]
        if home.poll() is not None:
            said = (self._folder / "home.txt").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the coordinator has ended with exit code {home.returncode}: {said}")

    def _serve(self) -> None:
        address = self._lab.host("home").address
        size = ("--providers", str(self._stages), "--clusters", "1")
        words = ("serve", "job.py", "--listen", f"{address}:7700", *size, "--run", "run", "--no-display")
        home = self._start("home", words, subprocess.PIPE)
        assert home.stdout is not None
        line = home.stdout.readline().decode()
        home.stdout.close()
        if not line.startswith("invite: ravnest join "):
            self._check()
            raise RuntimeError(f"the coordinator gave no invite, but {line!r}")
        self._invite = line.removeprefix("invite: ravnest join ").split()[0]

    def _join(self, name: str) -> None:
        self._start(name, ("join", self._invite, "--name", name, "--pretend-seconds", PACE))

    def _start(self, name: str, words: Sequence[str], stdout: int | None = None) -> "subprocess.Popen[Any]":
        # Each machine has a folder of its own, which outlives its process.
        disk = {f"XDG_{kind}_HOME": str(self._folder / name) for kind in ("DATA", "CACHE", "STATE")}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **disk}
        with open(self._folder / f"{name}.txt", "ab") as said:
            process = self._lab.host(name).popen(
                [sys.executable, "-m", "ravnest", *words],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said if stdout is None else stdout,
                stderr=said,
            )
        self._processes[name] = process
        return process
