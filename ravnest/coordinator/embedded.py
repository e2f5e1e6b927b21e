"""The embedded swarm: a coordinator and its providers on this machine, the same code as across the world.

The calling thread owns the requester's Python: it loads the job, captures the model and walks the data. A second
thread runs the network's loop with the coordinator on it. Providers are processes of their own, started first of all,
because importing torch is what takes longest; they get the invite through their standard input once the server
listens, and end when that pipe does.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ravnest.errors import PlanError, RavnestError, TrainingError

if TYPE_CHECKING:
    from ravnest.job import Job
    from ravnest.monitor.display import Display
    from ravnest.monitor.summary import Summary

T = TypeVar("T")

_STOP_SECONDS = 2.5
"""How long an interrupted run may take to finish what is in flight: the whole stop must fit in five seconds."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended, and where everything is."""

    summary: "Summary"
    run: Path
    model: Path | None
    """The fused model.safetensors, where one was written."""


def train(
    job: "Job",
    *,
    providers: int = 2,
    run: str | PathLike[str] | None = None,
    resume: bool = False,
    display: bool = True,
) -> TrainResult:
    """Trains the job on `providers` processes of this machine; raises a RavnestError when it cannot go on."""
    with _Processes(providers) as processes:
        return _train(job, "job", processes, run, resume, _display(display, plain=False))


def train_from_reference(
    reference: str, *, providers: int, run: Path | None, resume: bool, overrides: list[str], display: bool
) -> int:
    """`ravnest train`: the same for a job file. The exit code: 0 when it finished, 130 when it was interrupted."""
    with _Processes(providers) as processes:
        from ravnest.jobfile import load_job
        from ravnest.overrides import apply_overrides

        job = apply_overrides(load_job(reference), overrides)
        result = _train(job, _job_name(reference), processes, run, resume, _display(True, plain=not display))
    return 0 if result.summary.status == "finished" else 130


def _train(
    job: "Job",
    name: str,
    processes: "_Processes",
    path: str | PathLike[str] | None,
    resume: bool,
    display: "Display",
) -> TrainResult:
    from ravnest.coordinator.session import Session

    with ExitStack() as stack:
        stack.callback(display.close)
        loop = stack.enter_context(_Loop())
        session = Session(job, name, None if path is None else Path(path), resume, display, processes.started)
        stack.callback(session.close)
        stack.callback(loop.call_quietly, session.coordinator.close("the run is over"))
        processes.on_death(loop, session.coordinator.fail)
        processes.send(str(loop.call(session.coordinator.start())))
        return session.train(processes.count, processes.threads, loop.call, _STOP_SECONDS)


def _display(enabled: bool, plain: bool) -> "Display":
    from ravnest.monitor.display import PlainDisplay, open_display

    return PlainDisplay(sys.stderr) if plain else open_display(enabled, sys.stderr)


def _job_name(reference: str) -> str:
    """`examples/digits/job.py:name` -> digits: a file called job.py is best known by its folder."""
    place = Path(reference.partition(":")[0])
    stem = place.stem if place.suffix == ".py" else place.name
    return place.resolve().parent.name if stem == "job" and place.suffix == ".py" else stem


class _Loop:
    """The network's loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ravnest-net", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the loop. An interrupt of this thread cancels it and goes on as
        KeyboardInterrupt."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_quietly(self, work: Coroutine[Any, Any, None]) -> None:
        """For the end of things: what goes wrong there must not hide what went wrong before."""
        with suppress(RavnestError, asyncio.CancelledError, KeyboardInterrupt):
            self.call(work)

    def soon(self, function: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class _Processes:
    """The providers' processes. However the block ends, none of them outlives it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.threads = max(1, (os.cpu_count() or 1) // count)
        self.started = time.perf_counter()
        most = 4 * (os.cpu_count() or 1) + 16
        if count > most:
            raise PlanError(
                f"{count} providers are too many for the {os.cpu_count()} cores here; use --providers {most} or fewer"
            )
        # Set before torch is imported there: its thread pools are sized once.
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                command = [sys.executable, "-m", "ravnest", "join", "-", "--embedded", "--name", f"provider-{number}"]
                self._processes.append(
                    # Its own session: an interrupt typed at the terminal is the coordinator's to handle.
                    subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                )
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def send(self, invite: str) -> None:
        """Gives every provider the invite."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{invite}\n".encode())
                process.stdin.flush()

    def on_death(self, loop: _Loop, tell: Any) -> None:
        """Calls `tell` with an error when a provider's process ends by itself."""
        for number, process in enumerate(self._processes):
            threading.Thread(target=_watch, args=(number, process, loop, tell), daemon=True).start()

    def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + 1.5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(number: int, process: "subprocess.Popen[bytes]", loop: _Loop, tell: Any) -> None:
    code = process.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    loop.soon(tell, TrainingError(f"provider-{number} ended ({how}); continue from the last checkpoint with --resume"))
