"""The contenders at work on the hosts of one lab: processes that are told what to do in lines of JSON."""

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.report import ROOT, say
from ravnest.engine.speed.pace import StageSeconds
from tests.wan import Lab

MICROBATCHES = 8
"""Of a step of GPipe or 1F1B."""

_PARTS = "benchmarks.pipeline_parts"
_BARE_PORT = 29400
_END_SECONDS = 10.0
_LOOK_SECONDS = 10.0


class _Processes:
    """From `with` to its end."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start(self, lab: Lab, host: str, words: Iterable[str], said: Path | None = None) -> "subprocess.Popen[str]":
        data = str(self._folder / "data")
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": data, "XDG_CACHE_HOME": data}
        with ExitStack() as stack:
            errors = None if said is None else stack.enter_context(said.open("w"))
            process = lab.host(host).popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env={**os.environ, **more},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._undo.callback(_ended, process)
        return process


class BareLines(_Processes):
    """One TCP connection between each two neighbours, all of them at once, and nothing else."""

    def __init__(self, lab: Lab, hosts: Sequence[str], seconds: float) -> None:
        super().__init__()
        self._ends = []
        for one, other in pairwise(hosts):
            where = f"{lab.host(one).address}:{_BARE_PORT}"
            for host, words in ((one, ["listen", str(_BARE_PORT)]), (other, ["dial", where])):
                self._ends.append(self._start(lab, host, [f"{_PARTS}.tcp_line", *words, str(seconds)]))

    def bytes_per_second(self) -> float:
        """Of the line and the direction that carried least: a pipeline is no faster."""
        return min(float(_hear(end)) for end in self._ends)


class TorchPipelines(_Processes):
    """torch.distributed.pipelining over gloo: a process for each stage."""

    def __init__(self, lab: Lab, hosts: Sequence[str], stages: Sequence[int]) -> None:
        super().__init__()
        numbers = ",".join(map(str, sorted(set(stages))))
        meeting, count = str(self._folder / "meeting"), str(len(hosts))
        self._processes = [
            self._start(
                lab, host, [f"{_PARTS}.torch_stage", meeting, "eth0", str(rank), count, numbers, str(MICROBATCHES)]
            )
            for rank, host in enumerate(hosts)
        ]
        for process in self._processes:
            assert _hear(process) == "ready"

    def rate(self, task: str, stages: int, schedule: str, steps: int, pace: StageSeconds | None) -> "TorchRate":
        """Trains so many steps."""
        seconds = None if pace is None else [pace.forward, pace.backward]
        order = {"task": task, "stages": stages, "schedule": schedule, "steps": steps, "pace": seconds}
        for process in self._processes:
            _tell(process, order)
        answers = [_hear(process) for process in self._processes][:stages]
        took = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return TorchRate(MICROBATCHES / step_seconds(took, pace), sum(answer["overruns"] for answer in answers))


def step_seconds(took: Sequence[float], pace: StageSeconds | None) -> float:
    """What a step takes, of several, by the slowest stage of each. With a pace the fastest counts: all are to be alike,
    but the first finds connections that have been idle. Without one the mean does, but for the first: how fast a
    machine computes changes from moment to moment, and a run of Ravnest is not measured at its best moment either."""
    return statistics.fmean(took[1:] or took) if pace is None else min(took)


@dataclass(frozen=True, slots=True)
class TorchRate:
    microbatches_per_second: float
    overruns: int


@dataclass(frozen=True, slots=True)
class RavnestRate:
    """What `requester` says of a run."""

    microbatches_per_second: float
    microbatches: int
    busy: list[float]
    in_flight: int
    staleness_max: int
    bytes_per_microbatch: float
    """Sent over the link that carried most, one way."""
    predicted: float
    begins: list[str]
    """The first parameter of every stage but the first."""


class RunFailedError(Exception):
    """A run of Ravnest ended before its time."""


class RavnestSwarm(_Processes):
    """A coordinator at home, and a provider on each host."""

    def __init__(self, lab: Lab, hosts: Sequence[str], pace: StageSeconds | None) -> None:
        super().__init__()
        home = lab.host("home").address
        words = [f"{_PARTS}.requester", home, str(len(hosts)), str(self._folder)]
        self._requester = self._start(lab, "home", words)
        invite = _hear(self._requester)
        # As the other contenders: one that finds a GPU would compute on it.
        join = ["ravnest", "join", invite, "--cache", "0", "--device", "cpu"]
        if pace is not None:
            join += ["--pretend-seconds", f"{pace.forward},{pace.backward}"]
        self._said = [self._folder / f"{host}.log" for host in hosts]
        self._providers = [
            self._start(lab, host, [*join, "--name", host], said) for host, said in zip(hosts, self._said, strict=True)
        ]
        # The first to end: it tells the others to.
        self._undo.callback(_ended, self._requester)

    def rate(
        self, task: str, stages: int, warm_seconds: float, seconds: float, pipeline: dict[str, Any]
    ) -> RavnestRate:
        """Trains for so long after it has got going. RunFailedError says why it could not; another run may follow."""
        order = {
            "task": task,
            "stages": stages,
            "warm_seconds": warm_seconds,
            "seconds": seconds,
            "pipeline": {name: value for name, value in pipeline.items() if value is not None},
        }
        _tell(self._requester, order)
        assert self._requester.stdout is not None
        while not select.select([self._requester.stdout], [], [], _LOOK_SECONDS)[0]:
            self._check_providers()
        answer = _hear(self._requester)
        if "failed" in answer:
            raise RunFailedError(answer["failed"])
        return RavnestRate(**answer)

    def _check_providers(self) -> None:
        """A run waits for as many as it needs: one that could not even join would be waited for without end."""
        for process, said in zip(self._providers, self._said, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"a provider ended with exit code {process.returncode}: {said.read_text()[-2000:]}")

    def overruns(self) -> int:
        """Forwards and backwards that took longer than they should, in runs that were followed by another."""
        lines = [line for said in self._said for line in said.read_text().splitlines()]
        return sum(int(line.split()[0]) for line in lines if line.endswith("longer than this machine pretends"))


def _tell(process: "subprocess.Popen[str]", what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, process.args))} ended with exit code {process.wait()}")  # type: ignore[arg-type]
    return json.loads(line)


def _ended(process: "subprocess.Popen[str]") -> None:
    """One that sees the end of its lines ends by itself; a provider is told to."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"{process.pid} did not end by itself")
        process.kill()
        process.wait()
    process.stdout.close()
