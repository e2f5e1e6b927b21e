"""Swarm of homes in the WAN lab: `ravnest serve` at the requester, `ravnest join` at each home, real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from benchmarks.homes_parts.models import END
from benchmarks.homes_parts.population import Population
from benchmarks.homes_parts.reading import Snapshot
from benchmarks.recovery_parts.watching import RunObserver
from benchmarks.report import ROOT
from tests.wan import Host, Lab
from tests.wan import Path as Way

_JOB: Final = """from pathlib import Path

from benchmarks.homes_parts.models import job_of

job = job_of({model!r}, Path(__file__).parent)
"""
_PORT: Final = 7700
_START_SECONDS: Final = 900.0
"""Timeout for the first update: the model has to travel over the requester's line."""
_LISTEN_SECONDS: Final = 60.0
_INVITE: Final = "invite: ravnest join "
_LAST_WORDS: Final = 2000
_BUSY_SHARE: Final = 0.5
"""Share of this machine's cores that all homes together may use: each pretends to be slower accordingly."""


def slower(machines: int, cores: int) -> float:
    """How many times slower each machine pretends to be, so that machines that share these cores do not wait for one
    another."""
    return max(1.0, machines / (_BUSY_SHARE * cores))


def lab_of(population: Population) -> Lab:
    """A lab with the lines of all homes and of the requester."""
    every = (population.requester, *population.homes)
    hosts = [Host(each.name, up_mbps=each.up_mbps, down_mbps=each.down_mbps, nat=each.nat) for each in every]
    ways = {
        (one.name, other.name): Way(delay_ms=population.one_way_ms(one, other))
        for one in every
        for other in every
        if one is not other
    }
    return Lab(hosts, paths=ways)


class HomesSwarm:
    """A swarm within a `with` block, whose machines can be killed and started again with what is on their disks."""

    def __init__(self, folder: Path, population: Population, model: str, *, with_state: bool = True) -> None:
        """Without state there are no checkpoints by time, no rounds and no replicas."""
        self.watch = RunObserver(folder / "run")
        self.run = folder / "run"
        self._folder = folder
        self._population = population
        self._model = model
        self._with_state = with_state
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._invite = ""
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "job.py").write_text(_JOB.format(model=self._model), encoding="utf-8")
        with ExitStack() as undo:
            self._lab = undo.enter_context(lab_of(self._population))
            self._serve_first()
            for home in self._population.homes:
                self.join(home.name)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The lab kills all processes on its hosts.
        self._undo.close()

    @property
    def requester(self) -> str:
        return self._population.requester.name

    @property
    def names(self) -> list[str]:
        return [home.name for home in self._population.homes]

    def wait_for_training(self) -> None:
        """Wait until the first update; TimeoutError, or RuntimeError when the coordinator has ended."""
        self.wait(lambda: self.watch.events(0.0, "first_update"), _START_SECONDS, "first update")

    def wait(self, until: Callable[[], object], seconds: float, what: str) -> None:
        self.watch.wait(until, seconds, what, self._check)

    def pass_time(self, seconds: float) -> None:
        """Let the swarm train for this long; RuntimeError when the coordinator has ended."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, seconds + 60.0, "end of the pause")

    def snapshot(self) -> Snapshot:
        """The counters of all lines, and the traffic between stages by the current summary."""
        hosts = self._lab.status()["hosts"]
        sent = {name: int(host["counters"]["sent_bytes"]) for name, host in hosts.items()}
        received = {name: int(host["counters"]["received_bytes"]) for name, host in hosts.items()}
        idle, cores = psutil.cpu_times().idle, os.cpu_count() or 1
        return Snapshot(time.time(), sent, received, *self._between_stages(), idle, cores)

    def summary(self) -> dict[str, Any]:
        """The current summary of the run; empty before there is one."""
        path = self.run / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def kill(self, *names: str) -> float:
        """Kill the processes of these machines at once; the wall-clock time before."""
        at = time.time()
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._processes[name].wait()
        return at

    def join(self, name: str) -> None:
        """Start the provider of a home; after a kill it finds its own disk again."""
        factor = slower(len(self._population.homes), os.cpu_count() or 1)
        self._start(name, ["join", self._invite, "--name", name, "--cache", "0", "--pretend-slower", f"{factor:g}"])

    def resume(self) -> None:
        """Start the coordinator again after it was killed; returns when it listens."""
        invites = self.said(self.requester).count(_INVITE)
        self._start(self.requester, ["serve", "job.py", "--run", "run", "--resume", "--no-display", *self._settings()])
        # A provider that cannot reach the coordinator gives up.
        self.wait(lambda: self.said(self.requester).count(_INVITE) > invites, _LISTEN_SECONDS, "coordinator")

    def finish(self, seconds: float) -> float | None:
        """End the data and wait for the end of the run: how many seconds that took; None if it failed or did not end
        within the timeout."""
        began = time.monotonic()
        (self._folder / END).touch()
        try:
            code = self._processes[self.requester].wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - began if code == 0 else None

    def said(self, name: str) -> str:
        """Everything that a machine has printed."""
        path = self._folder / f"{name}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def _between_stages(self) -> tuple[dict[str, int], float]:
        stages = [stage for cluster in self.summary().get("clusters", ()) for stage in cluster["stages"]]
        sent = {stage["provider"]: sum(link["bytes_sent"] for link in stage["links"]) for stage in stages}
        return sent, (self.run / "summary.json").stat().st_mtime

    def _check(self) -> None:
        process = self._processes[self.requester]
        if process.poll() is not None:
            raise RuntimeError(
                f"the coordinator has ended, exit code {process.returncode}: {self.said(self.requester)}"
            )

    def _settings(self) -> list[str]:
        if self._with_state:
            return []
        from benchmarks.homes_parts.without_state import SETTINGS

        return [word for setting in SETTINGS for word in ("--set", setting)]

    def _serve_first(self) -> None:
        words = ["serve", "job.py", "--listen", f"{self._lab.host(self.requester).address}:{_PORT}"]
        words += ["--providers", str(len(self._population.homes)), "--run", "run", "--no-display", *self._settings()]
        if self._population.clusters is not None:
            words += ["--clusters", str(self._population.clusters)]
        self._start(self.requester, words, subprocess.PIPE)
        serving = self._processes[self.requester]
        assert serving.stdout is not None
        line = serving.stdout.readline().decode()
        serving.stdout.close()
        if not line.startswith(_INVITE):
            raise RuntimeError(
                f"the coordinator gave no invite, but {line!r}: {self.said(self.requester)[-_LAST_WORDS:]}"
            )
        self._invite = line.removeprefix(_INVITE).split()[0]

    def _start(self, name: str, words: Sequence[str], stdout: int | None = None) -> None:
        program = "ravnest" if self._with_state else "benchmarks.homes_parts.without_state"
        # Each machine has a disk of its own, which outlives its process.
        disk = {f"XDG_{kind}_HOME": str(self._folder / name) for kind in ("DATA", "CACHE", "STATE")}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **disk}
        with open(self._folder / f"{name}.txt", "ab") as said:
            self._processes[name] = self._lab.host(name).popen(
                [sys.executable, "-m", program, *words],
                cwd=self._folder,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=said if stdout is None else stdout,
                stderr=said,
            )
