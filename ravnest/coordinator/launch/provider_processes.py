"""Provider processes of an embedded swarm: each runs the command that a remote machine runs."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ravnest.cores import fair_share, usable_cores
from ravnest.errors import PlanError

Start = Callable[[list[str], dict[str, str]], "subprocess.Popen[bytes]"]
"""Starts a command with this environment, with pipes to its standard input and from its standard output."""

_END_SECONDS = 1.5


def start_process(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a provider in its own session: an interrupt typed at the terminal is for the coordinator to handle."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


class ProviderProcesses:
    """The processes of `count` providers. However the block ends, none of them outlives it, and they end when this
    process dies."""

    def __init__(
        self,
        count: int,
        devices: Sequence[str] = ("auto",),
        slower: Sequence[float] = (1.0,),
        start: "Start | None" = None,
    ) -> None:
        """Starts the processes on the devices in turn; `slower` gives the factors by which they compute slower, also in
        turn. `start` starts one of them (None: `start_process`).

        PlanError for a count or a factor that is not possible here.
        """
        self.count = count
        self._started: float | None = time.perf_counter()
        cores = usable_cores()
        most = 4 * cores + 16
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PlanError(f"providers is {count!r}: give a whole number of at least 1")
        if count > most:
            raise PlanError(
                f"{count} providers are too many for the {cores} cores here; use --providers {most} or fewer"
            )
        for factor in slower:
            if not 1 <= factor < math.inf:
                raise PlanError(f"slower is {factor!r} for a provider: give a number of at least 1, such as 2.5")
        threads = fair_share(cores, count, count - 1)
        # Set before the process imports torch, whose thread pools are sized only once.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tell: Callable[[str, str], None] | None = None
        self._telling = threading.Lock()
        self._ended: dict[str, str] = {}
        """By provider, how its process ended, until there is a callback."""
        self.told = 0
        """Number of processes whose end was reported to a callback."""
        self._invited = False
        self._ending = False
        try:
            for number in range(count):
                command = [sys.executable, "-m", "ravnest", "join", "-", "--embedded", "--name", _name(number)]
                command += ["--device", devices[number % len(devices)]]
                command += ["--pretend-slower", str(slower[number % len(slower)])]
                process = (start or start_process)(command, environment)
                self._processes.append(process)
                assert process.stdin is not None
                _pipes.add(process.stdin.fileno())
                threading.Thread(target=self._watch, args=(number, process), daemon=True).start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def running(self) -> dict[str, int]:
        """The process id of every provider that is running, by name."""
        return {_name(number): each.pid for number, each in enumerate(self._processes) if each.poll() is None}

    def take_start_time(self) -> float:
        """When the run began: the first run begins with the start of the processes, a later one now."""
        started, self._started = self._started, None
        return time.perf_counter() if started is None else started

    def invite(self, invite: str) -> None:
        """Sends every provider the invite through its standard input, because other users can read a command line."""
        self._invited = True
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{invite}\n".encode())
                process.stdin.flush()

    def on_death(self, tell: Callable[[str, str], None]) -> None:
        """Sets the callback for a process that ends by itself: it gets the provider's name and how the process ended.
        It is called at once for processes that have ended before."""
        with self._telling:
            self._tell = tell
            untold, self._ended = self._ended, {}
            for name, how in untold.items():
                self._tell_of(name, how)

    def kill(self) -> None:
        """Kills all processes immediately."""
        self._ending = True
        for process in self._processes:
            process.kill()

    def _watch(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        # Empty, or the sentence that says why the provider has ended.
        with process.stdout as stdout:
            said = stdout.read().decode(errors="replace").strip()
        code = process.wait()
        if not self._ending:
            with self._telling:
                self._tell_of(_name(number), said or _how(code))

    def _tell_of(self, name: str, how: str) -> None:
        if self._tell is None:
            self._ended[name] = how
        else:
            self.told += 1
            self._tell(name, how)

    def _end(self) -> None:
        if not self._invited:
            # The processes are still importing, have nothing to finish, and would read their pipe only after that.
            self.kill()
        self._ending = True
        try:
            for process in self._processes:
                assert process.stdin is not None
                _pipes.discard(process.stdin.fileno() if not process.stdin.closed else -1)
                with suppress(OSError):
                    process.stdin.close()
            deadline = time.monotonic() + _END_SECONDS
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            # Also when an interrupt arrives during the wait above.
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()


def _name(number: int) -> str:
    return f"provider-{number}"


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed, perhaps because the machine ran out of memory"
    if code < 0:
        return f"it was ended by signal {-code}"
    return f"it failed with exit code {code}" if code else "it ended by itself"


# Processes forked from this one (data loader workers) must not keep the pipes open when this one is killed.
_pipes: set[int] = set()


def _let_go_in_child() -> None:
    for descriptor in _pipes:
        with suppress(OSError):
            os.close(descriptor)
    _pipes.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
