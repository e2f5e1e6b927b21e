"""Processes of the contenders on the hosts of one lab, which receive orders in lines of JSON."""

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
from ravnest.engine.speed.pretended_pace import StageSeconds
from tests.wan import Lab

MICROBATCHES = 8
"""Microbatches in a step of GPipe or 1F1B."""

_PARTS = "benchmarks.pipeline_parts"
_BARE_PORT = 29400
_END_SECONDS = 10.0
_LOOK_SECONDS = 10.0


class _Processes:
    """Processes that run within a `with` block."""

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
    """One TCP connection between each two neighbours, all at the same time, without other traffic."""

    def __init__(self, lab: Lab, hosts: Sequence[str], seconds: float) -> None:
        super().__init__()
        self._ends = []
        for one, other in pairwise(hosts):
            where = f"{lab.host(one).address}:{_BARE_PORT}"
            for host, words in ((one, ["listen", str(_BARE_PORT)]), (other, ["dial", where])):
                self._ends.append(self._start(lab, host, [f"{_PARTS}.tcp_line", *words, str(seconds)]))

    def bytes_per_second(self) -> float:
        """The rate of the slowest direction of the slowest line, which bounds a pipeline."""
        return min(float(_hear(end)) for end in self._ends)


class TorchPipelines(_Processes):
    """torch.distributed.pipelining over gloo, with a process for each stage."""

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
        """Train this many steps."""
        seconds = None if pace is None else [pace.forward, pace.backward]
        order = {"task": task, "stages": stages, "schedule": schedule, "steps": steps, "pace": seconds}
        for process in self._processes:
            _tell(process, order)
        answers = [_hear(process) for process in self._processes][:stages]
        took = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return TorchRate(MICROBATCHES / step_seconds(took, pace), sum(answer["overruns"] for answer in answers))


def step_seconds(took: Sequence[float], pace: StageSeconds | None) -> float:
    """Seconds of a step, from the times of the slowest stage in several steps. With a pace, the fastest step counts:
    all should be equal, but the first one finds idle connections. Without a pace, the mean counts, without the first
    step: the speed of a machine varies, and a run of Ravnest is not measured at its best moment either."""
    return statistics.fmean(took[1:] or took) if pace is None else min(took)


@dataclass(frozen=True, slots=True)
class TorchRate:
    microbatches_per_second: float
    overruns: int


@dataclass(frozen=True, slots=True)
class RavnestRate:
    """Measurement of a run, as `requester` prints it."""

    microbatches_per_second: float
    microbatches: int
    busy: list[float]
    in_flight: int
    staleness_max: int
    bytes_per_microbatch: float
    """Bytes in one direction of the link with the most traffic."""
    predicted: float
    begins: list[str]
    """The first parameter of every stage but the first."""


class RunFailedError(Exception):
    """A run of Ravnest ended early."""


class RavnestSwarm(_Processes):
    """A coordinator on the requester's host, and a provider on each other host."""

    def __init__(self, lab: Lab, hosts: Sequence[str], pace: StageSeconds | None) -> None:
        super().__init__()
        home = lab.host("home").address
        words = [f"{_PARTS}.requester", home, str(len(hosts)), str(self._folder)]
        self._requester = self._start(lab, "home", words)
        invite = _hear(self._requester)
        # On the CPU, like the other contenders.
        join = ["ravnest", "join", invite, "--cache", "0", "--device", "cpu"]
        if pace is not None:
            join += ["--pretend-seconds", f"{pace.forward},{pace.backward}"]
        self._said = [self._folder / f"{host}.log" for host in hosts]
        self._providers = [
            self._start(lab, host, [*join, "--name", host], said) for host, said in zip(hosts, self._said, strict=True)
        ]
        # The coordinator ends first, because it tells the providers to end.
        self._undo.callback(_ended, self._requester)

    def rate(
        self, task: str, stages: int, warm_seconds: float, seconds: float, pipeline: dict[str, Any]
    ) -> RavnestRate:
        """Train for this long after the warm-up. RunFailedError if the run fails; another run may follow."""
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
        """RuntimeError if a provider has ended: a run would wait without end for a provider that could not join."""
        for process, said in zip(self._providers, self._said, strict=True):
            if process.poll() is not None:
                raise RuntimeError(f"a provider ended with exit code {process.returncode}: {said.read_text()[-2000:]}")

    def overruns(self) -> int:
        """Number of forwards and backwards that took longer than the pace, in all runs but the last."""
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
    """Wait for the end of a process. It ends at the end of its input, or after a signal."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"{process.pid} did not end by itself")
        process.kill()
        process.wait()
    process.stdout.close()
