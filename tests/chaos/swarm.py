"""Swarm under test: a coordinator and providers on hosts of their own, which the tests make fail.

Each machine is one host of the lab, one folder and at most one process at a time: a killed provider returns as the same
machine, with the files on its disk.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path as FilePath
from types import TracebackType
from typing import IO, Self

from benchmarks.homes_parts.population import Home, Population
from ravnest.net.identity.swarm_invite import SwarmInvite
from tests import warm
from tests.chaos.observer import Mark, RunObserver
from tests.known_speed import speed_is_known
from tests.wan import Host, Lab, LabHost, Path

HOME = "home"
ROOT = FilePath(__file__).resolve().parents[2]
LINE = Home("", up_mbps=50, down_mbps=100, round_trip_ms=5)
"""Line of every machine, unless the swarm has those of a population."""
PRETEND = "0.02,0.04"
"""Seconds of a forward and a backward of any stage, so that the two cores that all machines share are not the limit."""
START_SECONDS = 180.0
LEAVE_SECONDS = 60.0


class BrokenError(AssertionError):
    """The swarm cannot be used any more; the message is the reason."""


class Machine:
    """A host of the lab that runs `ravnest`, and its disk."""

    def __init__(self, host: LabHost, folder: FilePath) -> None:
        self.name = host.name
        self.host = host
        self.folder = folder
        self.process: warm.Process | None = None
        self.stopped = False
        folder.mkdir()
        speed_is_known(folder / "cache")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> FilePath:
        return self.folder / "output.txt"

    def start(self, *words: str, folder: FilePath, stdout: int | IO[bytes] | None = None) -> None:
        assert not self.is_running, f"{self.name} is already running"
        disk = {f"XDG_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("DATA", "CACHE", "STATE")}
        with self.log.open("ab") as log:
            self.process = self.host.warm(
                [sys.executable, "-m", "ravnest", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **disk},
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.stopped = False

    def output(self, last: int = 15) -> str:
        """The last lines that its processes printed, for error messages."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  {self.name}: {line}" for line in lines[-last:])


class ChaosSwarm:
    """`clusters` of `stages` machines each and `standbys` more, in one run; `strangers` are machines that have not
    joined.
    """

    def __init__(
        self,
        folder: FilePath,
        *,
        clusters: int = 1,
        stages: int = 3,
        standbys: int = 2,
        strangers: int = 1,
        epochs: int = 1,
        lines: Population | None = None,
    ) -> None:
        """With `lines`, the machines have the lines of its homes in turn, and the coordinator that of its requester."""
        self.folder = folder
        self.clusters = clusters
        self.stages = stages
        self.run = folder / "run"
        self.watch = RunObserver(self.run)
        self._epochs = epochs
        self._members = [f"p{number}" for number in range(1, clusters * stages + standbys + 1)]
        self.strangers = [f"s{number}" for number in range(1, strangers + 1)]
        self.lines = _lines(lines, [*self._members, *self.strangers])
        """The line of each machine."""
        self._stack = ExitStack()
        self._invite = ""

    def __enter__(self) -> Self:
        lines = self.lines
        hosts = [
            Host(name, up_mbps=line.up_mbps, down_mbps=line.down_mbps, nat=line.nat) for name, line in lines.items()
        ]
        paths = {
            (one, other): Path(delay_ms=(lines[one].round_trip_ms + lines[other].round_trip_ms) / 2)
            for one, other in itertools.permutations(lines, 2)
        }
        with ExitStack() as stack:
            self.lab = stack.enter_context(Lab(hosts, paths=paths))
            self.machines = {name: Machine(host, self.folder / name) for name, host in self.lab.hosts.items()}
            stack.callback(self._kill_all)
            (self.folder / "form").write_text(f"{self._epochs} {self.clusters}")
            shutil.copy(FilePath(__file__).with_name("job.py"), self.folder / "job.py")
            self._serve_first()
            for name in self._members:
                self.join(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # Actions

    def join(self, name: str) -> None:
        """Starts a provider on this machine, which joins for the first time or returns."""
        words = ("join", self._invite, "--name", name, "--pretend-seconds", PRETEND)
        self.machines[name].start(*words, folder=self.folder)

    def restart_coordinator(self) -> None:
        """Starts the coordinator again after it was killed; it listens on the same address."""
        words = ("serve", "job.py", "--run", "run", "--resume", "--no-display")
        self.machines[HOME].start(*words, folder=self.folder)

    def wait_until_left(self, name: str) -> None:
        """Waits until a provider that was told to leave has ended. BrokenError: timeout, or exit code other than 0."""
        process = self.machines[name].process
        assert process is not None
        try:
            code = process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BrokenError(
                f"{name} has not left {LEAVE_SECONDS:.0f} s after Ctrl-C:\n{self.output([name])}"
            ) from None
        if code != 0:
            raise BrokenError(f"{name} left with code {code}:\n{self.output([name])}")

    def end_epoch(self) -> None:
        """Ends the epoch, which starts an evaluation."""
        (self.folder / "end_epoch").touch()

    def end_run(self) -> None:
        """Ends the run: epochs that have not begun have one microbatch each."""
        (self.folder / "end_run").touch()

    @property
    def evaluating(self) -> bool:
        return (self.folder / "evaluating").exists()

    # State

    def holders(self, role: str) -> list[str]:
        """Machines with a stage of this role (root, stem, leaf), or without one (standby), according to the summary."""
        stages = [stage for cluster in self.watch.summary().get("clusters", ()) for stage in cluster["stages"]]
        holding = {stage["provider"] for stage in stages}
        if role == "standby":
            return [name for name in self.providers() if name not in holding and self.machines[name].is_running]
        return [stage["provider"] for stage in stages if stage["role"] == role]

    def providers(self) -> list[str]:
        """Machines that have been started at least once."""
        return [name for name, machine in self.machines.items() if name != HOME and machine.process is not None]

    def is_whole(self, since: float = 0.0) -> bool:
        """Whether all clusters exist on running machines, by a summary that was written after this time."""
        clusters = self.watch.summary(since).get("clusters", ())
        names = [stage["provider"] for cluster in clusters for stage in cluster["stages"]]
        return len(clusters) == self.clusters and all(
            self.machines[name].is_running and not self.machines[name].stopped for name in names
        )

    def all_stages_train(self, since: Mark) -> bool:
        """Whether every stage has applied updates since this mark."""
        updated = {(line["cluster"], line["stage"]) for line in self.watch.stage_steps(since)}
        clusters = self.watch.summary().get("clusters", ())
        return updated >= {(cluster["id"], stage["stage"]) for cluster in clusters for stage in cluster["stages"]}

    def layout(self) -> str:
        """The clusters by the last summary, and the running machines, as text."""
        clusters = self.watch.summary().get("clusters", ())
        held = [" ".join(stage["provider"] for stage in cluster["stages"]) for cluster in clusters]
        runs = [name for name in self.machines if self.machines[name].is_running]
        return f"clusters {' | '.join(held) or 'none'}, running {' '.join(runs)}"

    def check_running(self) -> None:
        """Raises BrokenError if the coordinator has ended by itself."""
        home = self.machines[HOME]
        if home.process is not None and home.process.poll() not in (None, -signal.SIGKILL):
            if self.watch.summary().get("status") == "finished":
                raise BrokenError("the run is over already")
            raise BrokenError(f"the coordinator has ended with code {home.process.returncode}:\n{home.output()}")

    def wait_for_training(self) -> None:
        """Waits until all clusters train. BrokenError: timeout."""
        if not self.watch.wait(self._trains, START_SECONDS):
            raise BrokenError(f"no training after {START_SECONDS:.0f} s:\n{self.output()}")

    def wait_for_end(self, seconds: float) -> int | None:
        """The exit code of the coordinator, or None if it has not ended in time."""
        process = self.machines[HOME].process
        assert process is not None
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def output(self, names: Iterable[str] = ()) -> str:
        return "\n".join(self.machines[name].output() for name in (names or self.machines))

    def _trains(self) -> bool:
        self.check_running()
        clusters = self.watch.summary().get("clusters", ())
        return len(clusters) == self.clusters and all(cluster["samples"] > 0 for cluster in clusters)

    def _serve_first(self) -> None:
        home = self.machines[HOME]
        size = ("--providers", str(self.clusters * self.stages), "--clusters", str(self.clusters))
        words = ("serve", "job.py", "--listen", f"{home.host.address}:7700", *size, "--run", "run", "--no-display")
        home.start(*words, folder=self.folder, stdout=subprocess.PIPE)
        assert home.process is not None and home.process.stdout is not None
        line = home.process.stdout.readline().decode()
        home.process.stdout.close()
        if not line.startswith("invite: ravnest join "):
            raise BrokenError(f"the coordinator did not start:\n{home.output()}")
        self._invite = SwarmInvite.parse(line.removeprefix("invite: ravnest join ")).line

    def _kill_all(self) -> None:
        for machine in self.machines.values():
            if machine.is_running:
                machine.kill()


def _lines(population: Population | None, names: Iterable[str]) -> dict[str, Home]:
    homes = (LINE,) if population is None else population.homes
    home = LINE if population is None else population.requester
    return {HOME: home, **dict(zip(names, itertools.cycle(homes), strict=False))}
