"""Contenders of benchmarks.scale in plain PyTorch: one process, and a pipeline of processes with 1F1B over gloo."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ROOT
from benchmarks.scale_parts.bounds import StageFigures

_PARTS = "benchmarks.scale_parts"


@dataclass(frozen=True, slots=True)
class TorchFigures:
    """What the processes of one measurement reported, the first stage first."""

    samples_per_second: float
    peak_bytes: list[int]
    parameters: list[int]


def plain(task: str, threads: int, steps: int) -> TorchFigures:
    """A loop of PyTorch in a new process with this many threads."""
    process = _start(["plain", task, str(threads), str(steps)], threads)
    return _figures([process])


def one_f_one_b(task: str, cuts: Sequence[int], microbatches: int, steps: int, threads: int) -> TorchFigures:
    """1F1B with a process for each stage; `cuts` are the first pieces of all but the first."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        cut_at = ",".join(map(str, cuts))
        processes = [
            _start(["torch_stage", task, str(rank), cut_at, str(microbatches), str(steps), meeting], threads)
            for rank in range(len(cuts) + 1)
        ]
        return _figures(processes)


def graph_figures(task: str, places: Sequence[Sequence[int]]) -> list[list[StageFigures]]:
    """The figures of the stages for each of these cuts, counted from the graph of the task's model."""
    process = _start(["graph_figures", task], 1)
    said, _ = process.communicate(json.dumps(places) + "\n")
    _check(process)
    return [[StageFigures(**stage) for stage in stages] for stages in json.loads(said)]


def _start(words: Sequence[str], threads: int) -> "subprocess.Popen[str]":
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", f"{_PARTS}.{words[0]}", *words[1:]],
        cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _figures(processes: Sequence["subprocess.Popen[str]"]) -> TorchFigures:
    said = [json.loads(process.communicate()[0] or "null") for process in processes]
    for process in processes:
        _check(process)
    # The slowest process ends the measurement.
    rate = min(each["samples_per_second"] for each in said)
    return TorchFigures(rate, [each["peak_bytes"] for each in said], [each["parameters"] for each in said])


def _check(process: "subprocess.Popen[str]") -> None:
    if process.returncode:
        words = " ".join(map(str, process.args))  # type: ignore[arg-type]
        raise RuntimeError(f"{words} ended with exit code {process.returncode}; its own output says why")
