"""Final check of a run: whether the model in the file is the one that the swarm evaluated.

The check runs on the requester's thread before the run reports that it has finished. It takes a share of the run's
time: a few tenths of a second for a short run. If it fails, the run fails; the model file stays for inspection, and
`--resume` no longer continues from the checkpoint that the file was made of.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from ravnest.coordinator.checkpoints.reader import CheckpointInfo, load_checkpoint
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.verification.decisions import Effort, effort, tolerance
from ravnest.coordinator.verification.evaluate_file import (
    check_model,
    computes_in_halves,
    weights_of,
)
from ravnest.coordinator.verification.reported_scores import ReportedScores, shortened
from ravnest.errors import TrainingError
from ravnest.graph.switch import draws_in_evaluation
from ravnest.monitor.summary import Check

Shorten = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class NotAsReportedError(TrainingError):
    """The model in the file is not the one that the swarm evaluated."""


def effort_for(prepared: PreparedJob, run_seconds: float) -> Effort:
    """How much to check, after a run of this length."""
    nodes = prepared.costs.nodes.values()
    return effort(run_seconds, sum(cost.forward_seconds for cost in nodes), prepared.costs.samples)


def shortening(prepared: PreparedJob, chosen: Effort) -> Shorten | None:
    """The function that shortens a batch to this effort; None when whole batches are evaluated."""
    if chosen.max_samples is None:
        return None
    sizes = {value.name: value.shape for value in prepared.captured.graph.inputs}
    return partial(shortened, sizes=sizes, samples=chosen.max_samples)


def first_tensors(prepared: PreparedJob) -> list[Mapping[str, torch.Tensor]]:
    """The batches that the model was captured on, for a run that neither trained nor evaluated anything."""
    return [prepared.captured.structure.flatten(batch) for batch in prepared.peeked]


def check_written(
    prepared: PreparedJob,
    info: CheckpointInfo,
    path: Path,
    witnessed: Sequence[ReportedScores],
    source: str,
    chosen: Effort,
    devices: Mapping[str, str],
) -> Check:
    """Evaluates the model in the file at `path`, made from this checkpoint, on batches that the swarm evaluated.
    RunError when the file cannot be read back."""
    if not witnessed:
        return Check(reason="not checked: the swarm has evaluated nothing of the model that was saved")
    captured = prepared.captured
    graph = captured.graph
    other_device = any(device and not device.startswith("cpu") for device in devices.values())
    if other_device and draws_in_evaluation(graph):
        return Check(
            reason="not checked: the model draws random numbers in evaluation, and the swarm's devices draw other ones "
            "than this processor"
        )
    elsewhere = {spec.key: captured.weights[spec.key] for spec in graph.constants}
    if unsaved := {spec.key for spec in graph.states} & set(captured.not_saved):
        buffers = load_checkpoint(info).buffers
        elsewhere |= {key: buffers[key] for key in unsaved if key in buffers}
    began = time.perf_counter()
    found = check_model(
        graph,
        weights_of(path, captured.aliases, elsewhere),
        witnessed,
        chosen,
        tolerance(computes_in_halves(graph), other_device),
        psutil.virtual_memory().available,
        prepared.job.seed,
    )
    return Check(
        status="passed" if found.comparison.passed else "failed",
        reason=found.comparison.reason
        if found.comparison.passed
        else f"{found.comparison.reason} (reported by {', '.join(found.providers)})",
        on=source,
        samples=found.samples,
        batches=found.batches,
        reported=found.reported,
        measured=found.measured,
        seconds=time.perf_counter() - began,
    )


def refusal(check: Check, path: Path, apart: Path, resumes_from: str) -> str:
    """The error message for a model that is not the one that was evaluated."""
    return (
        f"the model that was written is not the one that the swarm evaluated: of {check.on}, {check.reason}. A "
        f"provider saved something else than it trained, or reported something else than it computed; {path.name} and "
        f"{apart.parent.name}/{apart.name} stay to be looked at. Train again without providers that you do not "
        f"trust, or continue with --resume, which goes on from {resumes_from}"
    )
