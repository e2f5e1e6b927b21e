"""Processes of one contender, one for each member, on loopback or on hosts of the WAN lab."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.report import ROOT, say

PARTS = "benchmarks.averaging_parts"


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a member runs: its address, and a function that turns a command into one that runs there."""

    address: str
    on: Callable[[list[str]], list[str]] = list


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation of averaging: the module of its members, and their argument `extra`."""

    name: str
    module: str
    extra: str = "-"
    interpreter: str = sys.executable
    make_folder: Callable[[Path, int], None] | None = None
    """Writes the files that the members need into their folder."""


@dataclass(frozen=True, slots=True)
class Took:
    """One averaging: seconds of the slowest member, and processor seconds of all."""

    seconds: float
    processor_seconds: float


class Members:
    """The running members of a contender, within a `with` block."""

    def __init__(
        self, contender: Contender, sites: Sequence[Site], values: int, environment: Mapping[str, str]
    ) -> None:
        self.contender = contender
        self._sites = sites
        self._values = values
        self._environment = dict(environment)
        self._processes: list[subprocess.Popen[str]] = []
        self._ready = False
        self._failed_in_a_row = 0
        self.failure = ""
        """Why the last averaging failed; empty if it succeeded."""

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            if self.contender.make_folder is not None:
                self.contender.make_folder(folder, len(self._sites))
            undo.callback(self._end)
            for index, site in enumerate(self._sites):
                self._processes.append(self._start(index, site, folder))
            addresses = [self._hear(process) for process in self._processes]
            for process in self._processes:
                _tell(process, addresses)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def has_given_up(self) -> bool:
        """Whether it failed so often that further attempts would be a waste of time."""
        return self._failed_in_a_row >= _TRIES

    def wait_until_ready(self) -> None:
        """Wait until its members have prepared their next averaging, which is not measured and would disturb others."""
        if not self._ready and not self.has_given_up:
            for process in self._processes:
                assert self._hear(process) == "ready"
            self._ready = True

    def average(self) -> Took | None:
        """All members average once, starting when the last one is ready. None if that failed, with the reason in
        `failure`."""
        self.wait_until_ready()
        self._ready = False
        for process in self._processes:
            _tell(process, "go")
        answers = [self._hear(process) for process in self._processes]
        self.failure = next((answer["failed"] for answer in answers if "failed" in answer), "")
        if self.failure:
            self._failed_in_a_row += 1
            say(f"{self.contender.name} failed: {self.failure}")
            return None
        self._failed_in_a_row = 0
        return Took(
            max(answer["seconds"] for answer in answers), sum(answer["processor_seconds"] for answer in answers)
        )

    def _start(self, index: int, site: Site, folder: Path) -> "subprocess.Popen[str]":
        place = [str(index), str(len(self._sites)), site.address, str(self._values), str(folder), self.contender.extra]
        return subprocess.Popen(
            site.on([self.contender.interpreter, "-m", f"{PARTS}.{self.contender.module}", *place]),
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _hear(self, process: "subprocess.Popen[str]") -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a member of {self.contender.name} ended with exit code {process.wait()}")
        return json.loads(line)

    def _end(self) -> None:
        # A member ends by itself at the end of its input; one that does not is killed.
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


_END_SECONDS = 10.0
_TRIES = 3


def _tell(process: "subprocess.Popen[str]", what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
