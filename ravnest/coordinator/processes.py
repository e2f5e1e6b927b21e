"""The processes of an embedded swarm's providers: the same command a remote machine runs, started and ended here."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ravnest.errors import PlanError, RavnestError, TrainingError

_END_SECONDS = 1.5


class ProviderProcesses:
    """`count` providers. However the block ends, none of them outlives it; they also end when this process dies."""

    def __init__(self, count: int, devices: Sequence[str] = ("auto",)) -> None:
        """Starts them, on the devices in turn; PlanError when that many make no sense here."""
        self.count = count
        self._started: float | None = time.perf_counter()
        cores = os.cpu_count() or 1
        most = 4 * cores + 16
        if count > most:
            raise PlanError(
                f"{count} providers are too many for the {cores} cores here; use --providers {most} or fewer"
            )
        threads = max(1, cores // count)
        # Set before torch is imported there: its thread pools are sized once.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tell: Callable[[RavnestError], None] | None = None
        self._ending = False
        try:
            for number in range(count):
                command = [sys.executable, "-m", "ravnest", "join", "-", "--embedded", "--name", f"provider-{number}"]
                command += ["--device", devices[number % len(devices)]]
                # Its own session: an interrupt typed at the terminal is the coordinator's to handle.
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                self._processes.append(process)
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
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def take_start_time(self) -> float:
        """When the first run began: with the start of the processes. A later run begins when it asks."""
        started, self._started = self._started, None
        return time.perf_counter() if started is None else started

    def invite(self, invite: str) -> None:
        """Gives every provider the invite, through its standard input: a command line is there for all to see."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{invite}\n".encode())
                process.stdin.flush()

    def on_death(self, tell: Callable[[RavnestError], None]) -> None:
        """From now on `tell` gets an error when a provider's process ends by itself, at once if one already has."""
        self._tell = tell
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                tell(_ended(number, process))

    def _watch(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if self._tell is not None and not self._ending:
            self._tell(_ended(number, process))

    def _end(self) -> None:
        self._ending = True
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ended(number: int, process: "subprocess.Popen[bytes]") -> RavnestError:
    code = process.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return TrainingError(f"provider-{number} ended ({how}); continue from the last checkpoint with --resume")
