"""Loss of clusters that average in each codec, in one process: the same data, the same rounds, only the codec differs.

Each cluster is one model that trains on its own part of the data. Every few updates the real rings of
`ravnest.averaging` average all of them: differences, weights, segments, codecs and error feedback are those of a run.
Nothing depends on time, so two runs with one codec give the same loss.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import ravnest
from benchmarks.learning import Task
from benchmarks.report import Row, Target, say
from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.ring_reduce import Piece
from ravnest.averaging.ring_state import RingState
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.vector import Entry, RingVector
from ravnest.codecs.codec import CODECS

CODED: Final = ("bfloat16", "int8", "int4")
"""The lossy codecs that a ring gets by itself."""
MAX_ABOVE: Final = {"bfloat16": 0.005, "int8": 0.005, "int4": 0.02}
"""Maximum increase of the mean loss by each of them, in nats."""
UPDATES_BETWEEN: Final = (10, 40)
"""Updates of each cluster between two rounds: the shortest interval, and the one that codecs are chosen for."""


@dataclass(frozen=True, slots=True)
class Case:
    clusters: int
    updates: int
    """Updates of each cluster between two rounds."""


def coded_rounds(
    tasks: Sequence[Task], seeds: int, clusters: Sequence[int], quick: bool
) -> tuple[list[Row], list[Target]]:
    """A row for each task, number of clusters and interval, and a target for each codec."""
    rows: list[Row] = []
    above: dict[str, list[float]] = {codec: [] for codec in CODED}
    for task in tasks:
        epochs = task.quick_epochs if quick else task.epochs
        for case in (Case(count, updates) for count in clusters for updates in UPDATES_BETWEEN):
            losses = {
                codec: [final_loss(task.job(seed, epochs), case, codec) for seed in range(1, seeds + 1)]
                for codec in ("float32", *CODED)
            }
            title = f"{task.title}, {case.clusters} clusters, a round every {case.updates} updates, in one process"
            means = {codec: sum(values) / seeds for codec, values in losses.items()}
            differences = {codec: means[codec] - means["float32"] for codec in CODED}
            rows.append({"case": title, "loss": means["float32"]} | {f"{c}_above": d for c, d in differences.items()})
            told = ", ".join(f"{codec} {difference:+.4f}" for codec, difference in differences.items())
            say(f"{title}: float32 {means['float32']:.4f}, {told}")
            for codec, difference in differences.items():
                above[codec].append(difference)
    targets = [
        Target(
            f"{codec} with rounds in one process: loss above float32", sum(d) / len(d), MAX_ABOVE[codec], at_most=True
        )
        for codec, d in above.items()
    ]
    return rows, targets


def final_loss(job: ravnest.Job, case: Case, codec: str) -> float:
    """The loss on held-out data after the job's epochs and a last round."""
    torch.manual_seed(job.seed or 0)
    clusters = [_Cluster(job, codec) for _ in range(case.clusters)]
    for number, (inputs, target) in enumerate(_batches(job), start=1):
        clusters[number % case.clusters].learn(inputs, target)
        if number % (case.updates * case.clusters) == 0:
            _average(clusters)
    _average(clusters)
    return clusters[0].loss_on(job.eval_data)


def _batches(job: ravnest.Job) -> Iterator[tuple[Any, Any]]:
    for _ in range(job.epochs or 1):
        assert not callable(job.train_data)
        yield from job.train_data


class _Cluster:
    """A whole model, and its place in the one ring of all parameters."""

    def __init__(self, job: ravnest.Job, codec: str) -> None:
        self.model: nn.Module = copy.deepcopy(job.model)
        self._job = job
        self._optimizer = job.optimizer(self.model.parameters())
        self._schedule = None if job.schedule is None else job.schedule(self._optimizer)
        entries = [Entry(name, tuple(p.shape)) for name, p in self.model.named_parameters()]
        self._vector = RingVector(entries)
        self.ring = RingState(self._vector, self.flat(), outer_named("mean"), CODECS[codec])
        self.samples = 0

    def flat(self) -> Tensor:
        return self._vector.flatten(dict(self.model.named_parameters()))

    def learn(self, inputs: Any, target: Any) -> None:
        self.model.train()
        self._optimizer.zero_grad()
        torch.autograd.backward(self._job.loss(self.model(inputs), target))
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self.samples += len(target)

    @torch.no_grad()
    def add(self, changes: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.add_(changes[name])

    @torch.no_grad()
    def loss_on(self, batches: Any) -> float:
        self.model.eval()
        losses = [(float(self._job.loss(self.model(inputs), target)), len(target)) for inputs, target in batches]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)


def _average(clusters: Sequence[_Cluster]) -> None:
    """One round of the ring, with weights by samples and all pieces delivered in order."""
    total = sum(cluster.samples for cluster in clusters)
    if not total:
        return
    weights = [cluster.samples / total for cluster in clusters]
    contributions = [cluster.ring.contribute(cluster.flat()) for cluster in clusters]
    norms = [contribution.norm for contribution in contributions]
    reduces = [
        cluster.ring.reduce(contribution, RingPosition(index, weights, norms))
        for index, (cluster, contribution) in enumerate(zip(clusters, contributions, strict=True))
    ]
    on_the_way: deque[tuple[int, Piece]] = deque()
    for index, reduce in enumerate(reduces):
        on_the_way.extend(((index + 1) % len(reduces), piece) for piece in reduce.start())
    while on_the_way:
        index, piece = on_the_way.popleft()
        onward = reduces[index].receive(piece)
        if onward is not None:
            on_the_way.append(((index + 1) % len(reduces), onward))
    for cluster, contribution, reduce in zip(clusters, contributions, reduces, strict=True):
        cluster.add(cluster.ring.commit(cluster.ring.committed + 1, contribution, reduce).adds)
        cluster.samples = 0
