"""Coded state: what it costs to continue from a replica that was rounded on its way to the holder.

A stage trains and makes a replica every 50 updates. Each is coded as on a slow line, against the last one as the holder
has it, and decoded (`ravnest.provider.replicas.coded_parts.encoded`); the decoded file is bit for bit what a holder
stores, so no sockets are needed. From the last replica two stages continue for 200 updates on the same batches: one
from the owner's exact state, one from the holder's. The difference of their losses on held-out data is the cost.

Two runs that differ in a single bit go apart too: the row "last digit" has the same difference for an exact state whose
parameters are changed by one part in ten million. The figures are means over three seeds and several points of each
run; the standard error says how much of them is chance.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.learning import TASKS, Task
from benchmarks.quality_parts.virtual import VirtualPipeline
from benchmarks.report import Row, Target, arguments, finish, say
from ravnest.coordinator.feed.data_order import begin_epoch, seed_everything
from ravnest.coordinator.feed.feeder import first_batches
from ravnest.coordinator.plan.prepared_job import stage_settings
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.batch import samples_in
from ravnest.graph.capture.capture import capture
from ravnest.graph.portable import PortableGraph
from ravnest.provider.replicas.coded_parts import encoded
from ravnest.provider.replicas.files import PartFiles, ReplicaPart
from ravnest.provider.replicas.format import Restored, with_part
from ravnest.state.codings import INT8, LOSSLESS

_SEEDS: Final = 3
_EVERY: Final = 50
"""Updates between two replicas."""
_POINTS: Final = (150, 250, 350, 450)
"""Updates after which a holder's state is continued from."""
_AFTER: Final = 200
_MAX_COST: Final = 0.005
_LAST_DIGIT: Final = 1e-7
_KEY: Final = "stage"

Part = tuple[Mapping[str, torch.Tensor], Mapping[str, str]]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Training:
    """One stage that holds a whole model, its batches, and the held-out ones."""

    graph: PortableGraph
    weights: Mapping[str, torch.Tensor]
    settings: StageSettings
    batches: Sequence[Values]
    held_out: Sequence[tuple[Values, int]]

    def stage(self, part: Part | None = None) -> Stage:
        """A stage with the first weights, or with the state of a part."""
        own = {key: tensor.clone() for key, tensor in self.weights.items()}
        if part is None:
            return Stage(self.graph, own, self.settings)
        named = {f"weight:{key}": tensor for key, tensor in own.items()}
        tensors = {name: tensor.clone() for name, tensor in part[0].items()}
        stage = Stage(self.graph, with_part(self.graph, named, (tensors, part[1])), self.settings)
        stage.restore(Restored.of(tensors, part[1]).optimizer, part[1])
        return stage

    def loss_after(self, part: Part, updates: int) -> float:
        """The loss on held-out data when training goes on from this part, which contains this many updates."""
        pipeline = VirtualPipeline([self.stage(part)], 1)
        pipeline.train(self.batches[updates : updates + _AFTER])
        return pipeline.evaluate(self.held_out)


@dataclass(slots=True)
class Costs:
    """The figures of one task and one coding."""

    exact: list[float]
    differences: list[float]
    bytes_per_parameter: list[float]

    def row(self, case: str) -> Row:
        count = len(self.differences)
        error = statistics.stdev(self.differences) / count**0.5 if count > 1 else 0.0
        found = {
            "case": case,
            "exact_loss": statistics.mean(self.exact),
            "cost_nats": statistics.mean(self.differences),
            "standard_error": error,
        }
        if self.bytes_per_parameter:
            found["bytes_per_parameter"] = statistics.mean(self.bytes_per_parameter)
        return found


def main() -> int:
    given = arguments("coded_state", "the loss after continuing from coded state")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    seeds, points = (1, _POINTS[:1]) if given.quick else (_SEEDS, _POINTS)
    rows: list[Row] = []
    targets: list[Target] = []
    for task in TASKS:
        found = {name: Costs([], [], []) for name in (INT8, LOSSLESS, "last digit")}
        for seed in range(seeds):
            say(f"{task.title}, seed {seed}")
            _measure(_training(task, seed, max(points) + _AFTER), points, found)
        rows += [costs.row(f"{task.title}, {name}") for name, costs in found.items()]
        cost = statistics.mean(found[INT8].differences)
        targets.append(
            Target(f"{task.title}: cost of int8 after {_AFTER} updates, nats", cost, _MAX_COST, at_most=True)
        )
        changed = max(map(abs, found[LOSSLESS].differences))
        targets.append(Target(f"{task.title}: cost of lossless, nats", changed, 0.0, at_most=True))
    return finish("coded_state", given, rows, targets)


def _training(task: Task, seed: int, updates: int) -> Training:
    job = task.job(seed, 1)
    captured = capture(job.model, job.loss, job.metrics, first_batches(job))
    flatten = captured.structure.flatten
    weights = {key: tensor.detach().clone() for key, tensor in job.model.state_dict().items()}
    batches: list[Values] = []
    epoch = 0
    while len(batches) < updates:
        seed_everything(job.seed, epoch)
        begin_epoch(job.train_data, epoch)
        batches += map(flatten, job.train_batches())
        epoch += 1
    held_out = [(batch, samples_in(batch)) for batch in map(flatten, job.eval_batches())]
    known = {w.key: weights[w.key] if w.key in weights else captured.weights[w.key] for w in captured.graph.weights}
    return Training(captured.graph, known, stage_settings(job, 0, 1, 1), batches, held_out)


def _measure(training: Training, points: Sequence[int], found: Mapping[str, Costs]) -> None:
    """Trains once, and continues from each of these points in each way."""
    stage = training.stage()
    pipeline = VirtualPipeline([stage], 1)
    with tempfile.TemporaryDirectory() as folder:
        files, held = PartFiles(Path(folder)), dict[str, ReplicaPart]()
        for updates in range(_EVERY, max(points) + 1, _EVERY):
            pipeline.train(training.batches[updates - _EVERY : updates])
            part = files.write(_KEY, updates, *stage.state())
            coded = {name: encoded(files, part, name, held.get(name)) for name in (INT8, LOSSLESS)}
            held = {name: decoded for name, (_, decoded) in coded.items()}
            if updates not in points:
                continue
            exact, parameters = part.read(), sum(tensor.numel() for tensor in _parameters(stage))
            loss = training.loss_after(exact, updates)
            for name, (sent, decoded) in coded.items():
                _add(found[name], loss, training.loss_after(decoded.read(), updates))
                found[name].bytes_per_parameter.append(sent.size_bytes / parameters)
            _add(found["last digit"], loss, training.loss_after(_with_last_digits(exact), updates))


def _add(costs: Costs, exact: float, loss: float) -> None:
    costs.exact.append(exact)
    costs.differences.append(loss - exact)


def _with_last_digits(part: Part) -> Part:
    tensors, metadata = part
    changed = {
        name: tensor * (1 + _LAST_DIGIT * torch.randn_like(tensor)) if name.startswith("param:") else tensor
        for name, tensor in tensors.items()
    }
    return changed, metadata


def _parameters(stage: Stage) -> list[torch.Tensor]:
    return [tensor for name, tensor in stage.state_tensors().items() if name.startswith("param:")]


if __name__ == "__main__":
    sys.exit(main())
