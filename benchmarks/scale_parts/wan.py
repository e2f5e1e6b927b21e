"""Runs of Ravnest over slow lines in benchmarks.scale: `ravnest serve` and `ravnest join` on the hosts of a WAN lab."""

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.pipeline_parts.cells import Line
from benchmarks.report import ROOT
from benchmarks.scale_parts.ours import Run, environment, read, write_job
from tests.wan import Host, Lab

LINE: Final = Line("20/100", 20, 100)
SLOWER: Final = 4
"""How many times slower than it is each machine pretends to be."""
_PORT = 7700
_PATIENCE_SECONDS = 420.0
_END_SECONDS = 20.0


class Lines:
    """A lab with the requester near all providers, and this line between any two of them."""

    def __init__(self, providers: int) -> None:
        self._hosts = [f"p{number}" for number in range(providers)]
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        self._lab = self._undo.enter_context(Lab([Host("home"), *map(Host, self._hosts)]))
        for number, one in enumerate(self._hosts):
            for other in self._hosts[number + 1 :]:
                self._lab.pair(one, other).set(delay_ms=LINE.round_trip_ms / 2, rate_mbps=LINE.mbps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    def train(self, task: str, steps: int, folder: Path) -> Run:
        """One run with a stage on every host; RuntimeError when it fails."""
        job = write_job(task, steps, folder)
        listen = f"{self._lab.host('home').address}:{_PORT}"
        size = ("--providers", str(len(self._hosts)), "--clusters", "1")
        serve = ["serve", str(job), "--listen", listen, *size, "--run", str(folder / "run"), "--no-display"]
        said = folder / "said"
        serving = self._start("home", serve, said)
        assert serving.stdout is not None
        invite = serving.stdout.readline().strip().removeprefix("invite: ravnest join ")
        for host in self._hosts:
            # They share this machine's cores, and must not wait for one another: each pretends to be slower.
            join = ["join", invite, "--name", host, "--cache", "0", "--pretend-slower", str(SLOWER)]
            self._start(host, join, folder / f"{host}.said")
        try:
            serving.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the run did not end within {_PATIENCE_SECONDS:g} s: {_end_of(said)}") from None
        if serving.returncode:
            raise RuntimeError(f"ravnest serve ended with exit code {serving.returncode}: {_end_of(said)}")
        return read(folder / "run")

    def _start(self, host: str, words: list[str], said: Path) -> "subprocess.Popen[str]":
        data = str(self._folder / host)
        own = environment(OMP_NUM_THREADS="1", XDG_DATA_HOME=data, XDG_CACHE_HOME=data, PYTHONUNBUFFERED="1")
        with said.open("w") as file:
            process = self._lab.host(host).popen(
                [sys.executable, "-m", "ravnest", *words],
                cwd=ROOT,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._undo.callback(_ended, process)
        return process


def _ended(process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _END_SECONDS
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _end_of(said: Path) -> str:
    return said.read_text(encoding="utf-8")[-2000:]
