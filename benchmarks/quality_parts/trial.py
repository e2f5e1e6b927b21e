"""Trial: a training run in virtual time, of one task in one way with one learning rate and one seed."""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

import ravnest
from benchmarks.quality_parts.tasks import TASKS
from benchmarks.quality_parts.virtual import BACKWARD, FORWARD, VirtualPipeline, in_flight_of_plan
from ravnest.coordinator.feed.data_order import begin_epoch, seed_everything
from ravnest.coordinator.feed.feeder import first_batches
from ravnest.coordinator.plan.lr_schedule import rate_course_of
from ravnest.coordinator.plan.prepared_job import stage_settings
from ravnest.engine.stage import Stage
from ravnest.graph.batch import samples_in
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: number of stages, version policy and correction. One stage trains exactly like a plain loop, and
    so do more stages with one microbatch in flight."""

    task: str
    stages: int = 1
    versions: str = "stash"
    correction: str = "none"
    accumulate: int = 1
    link: float = 0.0
    """Latency of every link, in forwards."""
    codec: str = "float32"
    """Codec of every link, in both directions."""
    moments: str = "float32"
    """Form of the optimizer's moments between updates."""

    @property
    def in_flight(self) -> int:
        return in_flight_of_plan(self.stages, self.link)

    @property
    def title(self) -> str:
        more = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        if self.stages == 1:
            return f"{TASKS[self.task].title}, synchronous{more}"
        more += f", slow links, {self.in_flight} in flight" if self.link else ""
        more += f", {self.codec} on the links" if self.codec != "float32" else ""
        more += f", {self.moments} moments" if self.moments != "float32" else ""
        return f"{TASKS[self.task].title}, {self.stages} stages, {self.versions}, {self.correction}{more}"


@dataclass(frozen=True, slots=True)
class Trial:
    way: Way
    rate: float
    seed: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a trial: evaluations as (samples, loss). The trial ends at a loss that is not finite."""

    curve: tuple[tuple[int, float], ...]
    loss: float
    """The mean of the last evaluations; infinite if training failed."""
    staleness: float
    """Mean staleness of the root's updates."""
    full: tuple[float, ...] = ()
    """For each evaluation, the samples that a pipeline without idle stages would have trained on until then."""


def run_trial(trial: Trial) -> Outcome:
    """Train on one thread."""
    torch.set_num_threads(1)
    way, task = trial.way, TASKS[trial.way.task]
    job = job_of(trial)
    captured = _captured(way.task)
    weights = {key: tensor.detach().clone() for key, tensor in job.model.state_dict().items()}
    pipeline = VirtualPipeline(
        [
            Stage(graph, {w.key: _weight(captured, weights, w.key) for w in graph.weights}, settings)
            for graph, settings in zip(
                split(captured.graph, places(captured.graph, way.stages)),
                [
                    replace(stage_settings(job, number, way.stages, way.in_flight), versions=way.versions)
                    for number in range(way.stages)
                ],
                strict=True,
            )
        ],
        way.in_flight,
        way.link,
        way.codec,
        allowed(job, way),
    )
    held_out = [(batch, samples_in(batch)) for batch in map(captured.structure.flatten, job.eval_batches())]
    curve: list[tuple[int, float]] = []
    full: list[float] = []
    samples = 0
    try:
        for epoch in range(trial.epochs):
            seed_everything(job.seed, epoch)
            begin_epoch(job.train_data, epoch)
            batches = list(map(captured.structure.flatten, job.train_batches()))
            samples += sum(map(samples_in, batches))
            last = trial.epochs * len(batches) - 1
            pipeline.train(batches, last=last)
            curve.append((samples, pipeline.evaluate(held_out)))
            microbatches = pipeline.seconds / (FORWARD + BACKWARD)
            full.append(microbatches * samples / ((epoch + 1) * len(batches)))
    except FloatingPointError:
        return Outcome(tuple(curve), float("inf"), _mean_staleness(pipeline), tuple(full))
    loss = statistics.mean(loss for _, loss in curve[-task.evaluations :])
    return Outcome(tuple(curve), loss, _mean_staleness(pipeline), tuple(full))


def job_of(trial: Trial) -> ravnest.Job:
    """The job of a trial, which an embedded swarm can train as well."""
    way = trial.way
    job = TASKS[way.task].job(trial.seed, trial.epochs, trial.rate, way.accumulate)
    pipeline = ravnest.Pipeline(
        in_flight=way.in_flight,
        versions=way.versions,
        correction=way.correction,
        accumulate=way.accumulate,
        codec=way.codec,
        moments=way.moments,
    )
    return replace(job, pipeline=pipeline)


def allowed(job: ravnest.Job, way: Way) -> Callable[[int], int] | None:
    """The in-flight limit after a number of updates, as the coordinator sets it; None if the job sets the number."""
    course = rate_course_of(replace(job, pipeline=replace(job.pipeline, in_flight=None)))
    return None if course is None else partial(course.allowed, way.stages)


def places(graph: PortableGraph, stages: int) -> list[int]:
    """Cuts such that the numbers of trained layers in two stages differ by at most one."""
    plan = layout(graph)
    layers = sorted(set(plan.first_use.values()))
    if stages == 1:
        return []
    cuts = []
    for number in range(1, stages):
        first = layers[number * len(layers) // stages]
        # The last place before the layer begins; its input is computed in the previous stage.
        cut = plan.cuts[bisect_left(plan.cuts, first + 1) - 1]
        cuts.append(cut)
    assert len(set(cuts)) == stages - 1 and cuts == sorted(cuts), "the model has too few layers for this many stages"
    return cuts


@cache
def _captured(task: str) -> Captured:
    job = TASKS[task].job(0, 1, 1e-3, 1)
    return capture(job.model, job.loss, job.metrics, first_batches(job))


def _weight(captured: Captured, weights: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    return weights[key] if key in weights else captured.weights[key].clone()


def _mean_staleness(pipeline: VirtualPipeline) -> float:
    counts = pipeline.staleness[0]
    return sum(staleness * count for staleness, count in counts.items()) / max(1, counts.total())
