"""How much memory a provider takes, against its share of the model from first principles.

The share of a stage is what training it cannot do without: its parameters, their gradients, the optimizer's state, the
older versions of the weights that microbatches in flight still need, and the activations kept for those microbatches.
The target allows 1.3 times that on top of what a process that imports torch and does nothing else takes.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import ravnest
from benchmarks.models import GPT, LARGE, Repeated, next_token_loss, token_batches
from benchmarks.report import ROOT, Row, Target, arguments, finish, say
from ravnest.coordinator.embedded import EmbeddedSwarm
from ravnest.coordinator.prepare import Prepared, prepare
from ravnest.engine.schedule import flight_limit
from ravnest.graph.portable import ValueSpec
from ravnest.monitor.summary import StageSummary
from ravnest.planner.plan import ProviderProfile, StagePlan, plan_cluster

_FACTOR = 1.3
_BATCH_SIZE = 4
_MB = 1e6


def main() -> int:
    given = arguments("memory", "How much memory each provider takes against its share of the model.")
    rows: list[Row] = []
    targets: list[Target] = []
    bare = _bare_import_bytes()
    say(f"a process that imports torch: {bare / _MB:,.0f} MB")
    for stages in (3,) if given.quick else (2, 3, 4):
        found, worst = _measure(stages, bare, steps=3 * stages if given.quick else 6 * stages)
        rows += found
        targets.append(Target(f"{stages} stages: (peak - bare import of torch) / share", worst, _FACTOR, at_most=True))
    return finish("memory", given, rows, targets)


@dataclass(frozen=True, slots=True)
class Share:
    """What one stage needs, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    versions: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.versions + self.activations


def share_of(stage: StagePlan, prepared: Prepared, in_flight: int) -> Share:
    """The share of a stage trained with Adam while `in_flight` microbatches are between forward and backward there."""
    parameters = sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in stage.graph.parameters)
    costs, sample = prepared.costs, prepared.captured.sample
    saved = sum(costs.nodes[n.name].saved_bytes for n in stage.graph.nodes if n.name in costs.nodes)
    received = sum(_bytes(value, prepared, sample) for value in (*stage.graph.receives, *stage.graph.inputs))
    return Share(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters,
        # The newest microbatch in flight uses the weights as they are; each older one may need a version of its own.
        versions=(in_flight - 1) * parameters,
        activations=in_flight * (saved + received),
    )


def _measure(stages: int, bare: int, steps: int) -> tuple[list[Row], float]:
    """A row for each stage, and the worst factor among them."""
    job = _job(steps)
    # Cut here as the run will be cut: the same model, on profiles of the same machine.
    with tempfile.TemporaryDirectory() as folder, EmbeddedSwarm(stages) as swarm:
        prepared = prepare(job, 1, None, lambda phase: None)
        summary = swarm.train(job, run=Path(folder, "run"), display=False).summary
    providers = tuple(ProviderProfile(str(i), "here", stages, 1) for i in range(stages))
    plan = plan_cluster(prepared.captured.graph, prepared.costs, providers)
    rows, worst = [], 0.0
    for planned, ran in zip(plan.stages, summary.clusters[0].stages, strict=True):
        if planned.parameters != ran.parameters:
            raise SystemExit(f"stage {ran.stage} was cut elsewhere in the run than here; run the benchmark again")
        limit = 1 if ran.role == "leaf" else flight_limit(stages, None, None)[0]
        row, factor = _row(stages, ran, share_of(planned, prepared, limit), bare)
        say(f"{row['case']}: {factor:.2f} times its share")
        rows.append(row)
        worst = max(worst, factor)
    return rows, worst


def _row(stages: int, ran: StageSummary, share: Share, bare: int) -> tuple[Row, float]:
    factor = (ran.peak_memory_bytes - bare) / share.total
    row = {
        "case": f"stage {ran.stage} of {stages} ({ran.role})",
        "parameters_mb": share.parameters / _MB,
        "gradients_mb": share.gradients / _MB,
        "optimizer_mb": share.optimizer / _MB,
        "versions_mb": share.versions / _MB,
        "activations_mb": share.activations / _MB,
        "share_mb": share.total / _MB,
        "peak_mb": ran.peak_memory_bytes / _MB,
        "bare_torch_mb": bare / _MB,
        "idle_provider_mb": (ran.baseline_memory_bytes or 0) / _MB,
        "factor": factor,
    }
    return row, factor


def _job(steps: int) -> ravnest.Job:
    torch.manual_seed(0)
    return ravnest.Job(
        model=GPT(LARGE),
        loss=next_token_loss,
        train_data=Repeated(token_batches(LARGE, _BATCH_SIZE), steps),
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
        checkpoint=ravnest.Checkpoint(every_seconds=None),
    )


def _bare_import_bytes() -> int:
    """What a fresh process takes that imports torch and does nothing else."""
    code = "import torch; from ravnest.provider.memory import peak_bytes; print(peak_bytes(torch.device('cpu')))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(shown.stdout)


def _bytes(value: ValueSpec, prepared: Prepared, sample: Mapping[str, torch.Tensor]) -> int:
    if value.name in sample:
        return sample[value.name].nbytes
    cost = prepared.costs.nodes.get(value.name)
    return cost.output_bytes if cost is not None else 0


if __name__ == "__main__":
    sys.exit(main())
