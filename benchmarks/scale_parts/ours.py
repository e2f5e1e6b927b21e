"""Runs of Ravnest in benchmarks.scale, by the commands that users give, and the figures of their run directories."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.report import ROOT
from benchmarks.scale_parts.bounds import LinkUse
from ravnest.monitor.events import read_events
from ravnest.monitor.summary import StageSummary, Summary

_JOB = """from benchmarks.scale_parts.tasks import TASKS

job = TASKS[{task!r}].job({steps})
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that finished."""

    samples_per_second: float
    planned_samples_per_second: float
    stages: list[StageSummary]
    places: list[int]
    """Where the plan cut the graph."""
    limit: int
    """Largest number of microbatches in flight in the cluster."""
    links: list[LinkUse]
    """The link after each stage; after the last if it looks rows up for the first."""
    requester_peak_bytes: int

    @property
    def flying(self) -> list[int]:
        """The largest number of microbatches between forward and backward at each stage. With one microbatch per
        update, that is one more than the largest staleness; the backward of a leaf follows at once."""
        return [stage.staleness.max + 1 if stage.role != "leaf" else 1 for stage in self.stages]


def train(task: str, steps: int, providers: int, folder: Path, cores: int | None = None) -> Run:
    """`ravnest train` with this many providers, on all cores of this machine or on the first few."""
    job = write_job(task, steps, folder)
    command = [sys.executable, "-m", "ravnest", "train", str(job), "--providers", str(providers), "--no-display"]
    if cores is not None:
        command = ["taskset", "-c", f"0-{cores - 1}", *command]
    said = folder / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [*command, "--run", str(folder / "run")], cwd=ROOT, env=environment(), stdout=file, stderr=file
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            # The command ends its providers.
            process.terminate()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"ravnest train ended with exit code {process.returncode}: {said.read_text()[-2000:]}")
    return read(folder / "run", usage.ru_maxrss * 1024)


def write_job(task: str, steps: int, folder: Path) -> Path:
    """The job file of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.py"
    path.write_text(_JOB.format(task=task, steps=steps), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    """The environment of a command of Ravnest, which chooses its own numbers of threads."""
    left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def read(run: Path, requester_peak_bytes: int = 0) -> Run:
    """The figures of a run directory; RuntimeError for a run that did not finish, or that had a fault."""
    summary = Summary.read(run / "summary.json")
    if summary.status != "finished" or summary.faults or summary.ledger.replayed:
        faults = [f"{fault.kind} of {fault.provider}" for fault in summary.faults]
        raise RuntimeError(f"{run}: {summary.status}, {summary.reason}; faults: {faults}")
    events = list(read_events(run / "events.jsonl"))
    planned = [event for event in events if event["kind"] == "planned"]
    flights = [event["new"] for event in events if event["kind"] == "in_flight"]
    stages = list(summary.clusters[0].stages)
    return Run(
        samples_per_second=summary.samples_per_second,
        planned_samples_per_second=summary.predicted_samples_per_second or 0.0,
        stages=stages,
        places=list(planned[-1]["places"][0]),
        limit=max([*flights, *planned[-1]["in_flight"]]),
        links=link_uses(stages, summary.ledger.completed, evaluated(run / "trace.json")),
        requester_peak_bytes=requester_peak_bytes,
    )


def link_uses(stages: list[StageSummary], trained: int, evaluated: int) -> list[LinkUse]:
    """The use of each link between two stages, from what its two ends sent; bytes without the codec. The last is that
    from the leaf to the root, if there is one."""
    found = []
    pairs = list(pairwise(stages))
    if len(stages) > 1 and len(stages[-1].links) > 1:
        pairs.append((stages[-1], stages[0]))
    for before, after in pairs:
        # Two stages may have two links with each other; a stage tells of the link to the stage before it first.
        forward = next(link.bytes_raw for link in reversed(before.links) if link.to == after.provider)
        backward = next(link.bytes_raw for link in after.links if link.to == before.provider)
        found.append(LinkUse(forward, backward, trained + evaluated, trained))
    return found


def evaluated(trace: Path) -> int:
    """Microbatches that were evaluated to check the saved model, from the trace: their activations crossed the links,
    too, and the check may have compared fewer."""
    spans: Counter[tuple[int, int]] = Counter()
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X" and event["name"].split()[0] == "evaluate":
            spans[event["pid"], event["tid"]] += 1
    return max(spans.values(), default=0)


def plain_json(run: Run) -> dict[str, object]:
    """The figures of each stage, for the file."""
    return {
        "stages": [
            {
                "parameters": stage.parameters,
                "peak_bytes": stage.peak_memory_bytes,
                "baseline_bytes": stage.baseline_memory_bytes,
                "busy": stage.busy_fraction,
                "staleness_max": stage.staleness.max,
            }
            for stage in run.stages
        ],
        "places": run.places,
    }
