"""Prepared job: captured and profiled, and ready to be cut for the providers of a plan."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ravnest.coordinator.checkpoints.reader import CheckpointContents
from ravnest.coordinator.checkpoints.resume_optimizer import resumed_metadata
from ravnest.coordinator.feed.data_order import epoch_size
from ravnest.coordinator.feed.feeder import Guard, first_batches
from ravnest.coordinator.plan.cost_cache import keep_costs, kept_costs, key_of
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.cores import usable_cores
from ravnest.engine.corrections.correction import DEFAULT as DEFAULT_CORRECTION
from ravnest.engine.corrections.correction import correction_refusal
from ravnest.engine.corrections.discount import warm_up_updates
from ravnest.engine.settings import StageSettings
from ravnest.engine.speed.calibrate import calibrate, products_speed, step_bytes, time_steps
from ravnest.engine.speed.device_speed import measure_speed
from ravnest.engine.speed.update_time import measure_coding, measure_copy, measure_correction, measure_update
from ravnest.engine.weights.packed_moments import moments_refusal
from ravnest.errors import JobError, RunError
from ravnest.graph.batch import samples_in
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.initial_weights.find_initial import InitialWeight, find_initial
from ravnest.graph.initial_weights.recorder import draws_of
from ravnest.graph.initial_weights.sources_text import sources_text
from ravnest.graph.profile import CostProfile, profile
from ravnest.graph.program import Program
from ravnest.graph.update_cost import UpdateCost, time_update
from ravnest.graph.weights import content_hash, stream_header, stream_size_bytes, stream_tensors
from ravnest.job import Job
from ravnest.planner.plan import StagePlan

_SPEED_SECONDS = 0.4
_LONG_FORWARD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job ready to be planned and deployed."""

    job: Job
    captured: Captured
    costs: CostProfile
    peeked: Sequence[Any]
    """The batches that the model was captured with."""
    restored: CheckpointContents | None = None
    initial: Mapping[str, InitialWeight] = field(default_factory=dict)
    """By key, how providers get the weights of a new run without their bytes; empty if all of them travel."""


def prepare(
    job: Job,
    threads: int | None,
    restored: CheckpointContents | None,
    on_phase: Callable[[str], None],
    guard: Guard = contextlib.nullcontext,
    kept: Path | None = None,
) -> PreparedJob:
    """Captures and profiles the job's model; CaptureError or JobError, with the reason, if that is not possible.

    The profile uses `threads` threads, or the number of `choose_threads`. The file `kept` caches its result.
    """
    refusal = moments_refusal(job.pipeline.moments, job.optimizer_spec)
    if refusal is not None:
        raise JobError(f'pipeline.moments is "{job.pipeline.moments}": {refusal}')
    on_phase("capturing the model")
    peeked = first_batches(job, guard)
    captured = capture(job.model, job.loss, job.metrics, peeked)
    key = key_of(job, captured, threads)
    costs = None if kept is None else kept_costs(kept, key)
    if costs is None:
        on_phase("profiling the model")
        costs = _measured(job, captured, threads)
        if kept is not None:
            keep_costs(kept, key, costs)
    return PreparedJob(job, captured, costs, peeked, restored)


def with_initial_weights(prepared: PreparedJob) -> PreparedJob:
    """The job of a new run, with what providers need to get its weights without their bytes. Takes a few seconds for
    each gigabyte."""
    if prepared.restored is not None:
        return prepared
    return replace(prepared, initial=find_initial(prepared.captured.weights, draws_of(prepared.job.model)))


def _measured(job: Job, captured: Captured, threads: int | None) -> CostProfile:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or 1)
        if threads is None:
            torch.set_num_threads(choose_threads(_forward_seconds(captured), usable_cores()))
        return measure_costs(job, captured)
    finally:
        torch.set_num_threads(before)


def choose_threads(forward_seconds: float, cores: int) -> int:
    """Number of threads for profiling a model whose forward takes this long on one thread.

    One thread, whose processor time can be measured apart from that of other programs, unless it would take too long.
    """
    return 1 if forward_seconds <= _LONG_FORWARD_SECONDS else cores


def _forward_seconds(captured: Captured) -> float:
    weights = {spec.name: captured.weights[spec.key] for spec in captured.graph.weights}
    began = time.perf_counter()
    with torch.no_grad():
        Program(captured.graph).run(captured.sample, weights, train=False)
    return time.perf_counter() - began


def measure_costs(job: Job, captured: Captured) -> CostProfile:
    """The costs of the model on this machine, with the current number of threads, and the speed of the machine."""
    graph, weights, sample = captured.graph, captured.weights, captured.sample
    costs = profile(graph, weights, sample, samples_in(sample))
    costs = replace(costs, update=update_cost(job))
    available_bytes = psutil.virtual_memory().available
    # Without the schedule: its cost is negligible, and it may end after the steps of the job.
    settings = replace(stage_settings(job, 0, 1, 1), schedule=None)
    exact = replace(settings, precision="float32")
    costs = calibrate(costs, graph, weights, sample, exact, available_bytes)
    if settings.precision != exact.precision:
        # Precision changes only the products, by a factor that depends on the machine.
        fits = step_bytes(costs, graph) <= available_bytes
        faster = products_speed(costs, time_steps(graph, weights, sample, settings)) if fits else 1.0
        costs = replace(costs, precision=settings.precision, precision_speed=faster)
    speed = measure_speed(torch.device("cpu"), available_bytes, _SPEED_SECONDS, halves=())
    return replace(
        costs, flops_per_second=speed.flops_per_second, memory_bytes_per_second=speed.memory_bytes_per_second
    )


def update_cost(job: Job) -> UpdateCost:
    """The cost of the job's updates on this machine."""
    moments, correction = job.pipeline.moments, choose_correction(job)[0]
    return time_update(
        job.optimizer_spec,
        job.pipeline.accumulate,
        partial(measure_update, moments=moments),
        measure_copy,
        measure_coding,
        partial(measure_correction, job.optimizer_spec, moments, correction),
    )


def stage_settings(
    job: Job,
    stage: int,
    stages: int,
    in_flight: int,
    *,
    max_in_flight: int | None = None,
    versions: str = "stash",
    split_backward: bool = False,
    clusters: int = 1,
) -> StageSettings:
    """The settings that the provider of one stage gets; `clusters` share the run."""
    schedule = job.schedule_spec
    return StageSettings(
        optimizer=job.optimizer_spec.to_json(),
        schedule=None if schedule is None else schedule.to_json(),
        stage=stage,
        stages=stages,
        seed=job.seed,
        accumulate=job.pipeline.accumulate,
        clip_norm=job.pipeline.clip_norm,
        clip_value=job.pipeline.clip_value,
        in_flight=in_flight,
        max_in_flight=max_in_flight,
        max_staleness=job.pipeline.max_staleness,
        versions=versions,
        correction=choose_correction(job)[0],
        warm_up_updates=warm_up_updates(updates_of(job, clusters)),
        precision=job.pipeline.precision,
        moments=job.pipeline.moments,
        compiled=job.pipeline.compiled,
        split_backward=split_backward,
        trace=job.pipeline.trace,
        record_updates=job.pipeline.record_updates,
    )


def updates_of(job: Job, clusters: int) -> int | None:
    """Updates that each cluster makes in the whole run; None if the data does not tell."""
    size = epoch_size(job.train_data, 1)
    known = [] if size is None else [job.epochs * size[0] // job.pipeline.accumulate]
    updates = min([*known, *([] if job.max_updates is None else [job.max_updates])], default=None)
    return None if updates is None else updates // clusters


def choose_correction(job: Job) -> tuple[str, str]:
    """The correction of staleness for this job, and why."""
    asked = job.pipeline.correction
    if asked == "none":
        return "none", "staleness is not corrected, as asked for"
    name = asked or DEFAULT_CORRECTION
    refusal = correction_refusal(name, job.optimizer_spec)
    if refusal is not None:
        return (
            "none",
            f"staleness is not corrected: {name} was {'asked for' if asked else 'the default'}, and {refusal}",
        )
    return name, f"staleness is corrected by {name}, {'as asked for' if asked else 'the default'}"


def graph_artifact(plan: StagePlan) -> Artifact:
    text = plan.graph.to_json().encode()
    return _artifact(
        f"graph-{plan.stage}", hashlib.sha256(text).hexdigest(), len(text), lambda offset: iter([text[offset:]])
    )


def weights_artifact(plan: StagePlan, prepared: PreparedJob, averaged: bool = False) -> Artifact:
    """The stage's weights from the model, or from a checkpoint with the optimizer's state, and with the outer
    optimizer's if the stage is `averaged` with other clusters."""
    tensors, metadata = _stage_tensors(plan, prepared)
    if averaged and prepared.restored is not None and prepared.job.averaging.outer == "nesterov":
        outer = prepared.restored.outer
        tensors |= {f"outer:{s.key}": _saved(outer, s.key, s.shape) for s in plan.graph.parameters if s.key in outer}
    return _tensors_artifact(f"weights-{plan.stage}", tensors, metadata)


def sources_artifact(plan: StagePlan, prepared: PreparedJob) -> Artifact | None:
    """How the provider of a stage gets the tensors of `weights_artifact` without the coordinator; None if it cannot."""
    if prepared.restored is not None or not prepared.initial:
        return None
    tensors, metadata = _stage_tensors(plan, prepared)
    initial = {f"weight:{w.key}": prepared.initial[w.key] for w in plan.graph.weights}
    text = sources_text(stream_header(tensors, metadata), initial)
    sha256 = hashlib.sha256(text).hexdigest()
    return _artifact(f"sources-{plan.stage}", sha256, len(text), lambda offset: iter([text[offset:]]))


def constants_artifact(plan: StagePlan, prepared: PreparedJob) -> Artifact:
    """The stage's constant weights: together with a part of a replica, they make the whole stage."""
    weights = prepared.captured.weights
    tensors = {f"weight:{spec.key}": weights[spec.key] for spec in plan.graph.constants}
    return _tensors_artifact(f"constants-{plan.stage}", tensors, {})


def static_tensors(captured: Captured) -> dict[str, torch.Tensor]:
    """Entries of the model's state_dict that training never changes."""
    constants = {c.key: captured.weights[c.key] for c in captured.graph.constants if c.key not in captured.not_saved}
    return {**constants, **captured.static}


def _tensors_artifact(name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Artifact:
    return _artifact(
        name,
        content_hash(stream_tensors(tensors, metadata)),
        stream_size_bytes(tensors, metadata),
        lambda offset: stream_tensors(tensors, metadata, offset_bytes=offset),
    )


def _artifact(name: str, sha256: str, size_bytes: int, open_at: Callable[[int], Iterator[bytes]]) -> Artifact:
    # Named by content: a transfer that resumes after another deployment must not continue with that one's bytes.
    return Artifact(f"{name}-{sha256[:16]}", sha256, size_bytes, open_at)


def _stage_tensors(plan: StagePlan, prepared: PreparedJob) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    restored, weights = prepared.restored, prepared.captured.weights
    tensors: dict[str, torch.Tensor] = {f"weight:{w.key}": weights[w.key] for w in plan.graph.weights}
    if restored is None:
        return tensors, {}
    for spec in plan.graph.parameters:
        tensors[f"weight:{spec.key}"] = _saved(restored.parameters, spec.key, spec.shape)
        for name, value in restored.optimizer.get(spec.key, {}).items():
            tensors[f"optim:{spec.key}:{name}"] = value
    for spec in plan.graph.states:
        tensors[f"weight:{spec.key}"] = _saved(restored.buffers, spec.key, spec.shape)
    return tensors, resumed_metadata(restored.metadata, restored.manifest["state"], prepared.job)


def _saved(saved: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = saved.get(key)
    if tensor is None or tuple(tensor.shape) != shape:
        raise RunError(
            f"the checkpoint does not fit the model: {key} is missing or has another shape; resume with the same model"
        )
    return tensor
