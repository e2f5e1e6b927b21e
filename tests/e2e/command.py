"""The command line as a user meets it: a process of its own, what it says, and what it leaves behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.warm import started

COMMAND = (sys.executable, "-m", "ravnest")
PATIENCE_SECONDS = 60.0


def environment(**more: str) -> dict[str, str]:
    """What a command is started with; a variable that is empty is left out."""
    return {name: value for name, value in {**os.environ, "OMP_NUM_THREADS": "1", **more}.items() if value}


def ravnest(*words: str | Path, folder: Path, warm: bool = False) -> "subprocess.CompletedProcess[str]":
    """Runs the command to its end; none of the processes it started is there afterwards."""
    with Running(*words, folder=folder, warm=warm) as running:
        output = running.to_the_end()
    assert running.process.returncode is not None
    return subprocess.CompletedProcess(running.words, running.process.returncode, running.out, output)


class Running:
    """`ravnest` at work, in a process group of its own as a shell's job has; what it says on stderr can be awaited."""

    def __init__(
        self,
        *words: str | Path,
        folder: Path,
        on: Callable[[list[str]], Sequence[str]] = list,
        warm: bool = False,
        **variables: str,
    ) -> None:
        """`on` turns the command into one that runs elsewhere, on a host of a lab say. A `warm` one begins with its
        imports done."""
        self.words = list(on([*COMMAND, *map(str, words)]))
        start = started if warm else subprocess.Popen
        self.process = start(
            self.words,
            cwd=folder,
            env=environment(PYTHONUNBUFFERED="1", **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self.patience_seconds = PATIENCE_SECONDS
        self.said = ""
        self.out = ""
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.family()
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        left = self.left_behind()
        for process in left:
            process.kill()
        if kind is None:
            assert not left, f"left behind: {left}"

    def until(self, words: str) -> str:
        """Waits until `words` have been said; what was said up to then."""
        deadline = time.monotonic() + self.patience_seconds
        while words not in self.said:
            if not self._read(deadline):
                raise AssertionError(f"{words!r} was never said, but: {self.said}")
        self.family()
        return self.said

    def to_the_end(self) -> str:
        """Waits for its end; all it said."""
        deadline = time.monotonic() + self.patience_seconds
        while self._read(deadline):
            self.family()
        assert self.process.stdout is not None
        self.out += self.process.stdout.read().decode()
        self.process.wait(self.patience_seconds)
        return self.said

    def family(self) -> set[psutil.Process]:
        """Every process it has started so far, as far as they were seen."""
        with suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._family

    def providers(self) -> list[psutil.Process]:
        return [process for process in self.family() if "--embedded" in process.cmdline()]

    def left_behind(self, within_seconds: float = 3.0) -> list[psutil.Process]:
        """What it started and has not ended; whatever is ending already is given a moment."""
        return still_there(self._family, within_seconds)

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        os.killpg(self.process.pid, number) if group else self.process.send_signal(number)

    def _read(self, deadline: float) -> bool:
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"nothing more was said in time, after: {self.said}")
        chunk = os.read(self.process.stderr.fileno(), 65536)
        self.said += chunk.decode()
        return bool(chunk)


def still_there(processes: Iterable[psutil.Process], within_seconds: float) -> list[psutil.Process]:
    """Those that have not ended in time; one that has ended and whom nobody has asked how is not there any more."""
    deadline, left = time.monotonic() + within_seconds, list(processes)
    while left := [process for process in left if _is_alive(process)]:
        descriptor = _pidfd(left[0])
        if descriptor is None:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)
        if not ended:
            break
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pidfd(process: psutil.Process) -> int | None:
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fails when the block takes longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took <= seconds, f"{what} took {took:.1f} s, longer than {seconds} s"
