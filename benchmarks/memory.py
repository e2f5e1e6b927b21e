"""Memory: how much a provider takes, relative to the share of its stage computed from first principles.

The share of a stage is the memory that training needs at least: parameters, gradients, optimizer state, and the data
that its version policy keeps for microbatches in flight, which are older versions of the weights, activations and
inputs. The target is 1.3 times the share, in addition to the memory of a process that only imports torch.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import ravnest
from benchmarks.models import GPT, LARGE, Repeated, next_token_loss, token_batches
from benchmarks.report import ROOT, Row, Target, arguments, finish, say
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.engine.corrections.correction import DEFAULT, PREDICTING
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.monitor.events import read_events
from ravnest.monitor.summary import StageSummary
from ravnest.planner.cluster import SPARE
from ravnest.version_policy import POLICIES, VersionPolicy

_FACTOR = 1.3
_BATCH_SIZE = 4
_IN_FLIGHT = 4
_MB = 1e6


def main() -> int:
    given = arguments("memory", "How much memory each provider takes against its share of the model.")
    rows: list[Row] = []
    targets: list[Target] = []
    bare = _bare_import_bytes()
    say(f"a process that imports torch takes {bare / _MB:,.0f} MB")
    prepared = prepare(_job(1), 1, None, lambda phase: None)
    cases: list[tuple[int, str, int | None]] = (
        [(2, "stash", None)] if given.quick else [(stages, "stash", None) for stages in (2, 3, 4)]
    )
    # The same number in flight for every policy, so that only the data kept for each microbatch differs.
    cases += [(2, versions, _IN_FLIGHT) for versions in (("recompute", "latest") if given.quick else POLICIES)]
    for stages, versions, in_flight in cases:
        found = _measure(stages, versions, in_flight, prepared, bare)
        rows += found
        worst = max(float(str(row["factor"])) for row in found)
        name = f"{stages} stages, {versions}: (peak - bare import of torch) / share"
        if in_flight is not None:
            name = f"{in_flight} in flight, {name}"
        targets.append(Target(name, worst, _FACTOR, at_most=True))
    return finish("memory", given, rows, targets)


@dataclass(frozen=True, slots=True)
class Share:
    """Memory that one stage needs, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    versions: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.versions + self.activations


def share_of(stage: PortableGraph, prepared: PreparedJob, in_flight: int, limit: int, policy: VersionPolicy) -> Share:
    """The share of a stage trained with Adam while it has `in_flight` microbatches between forward and backward.

    With the default correction, which predicts weights.

    `limit` microbatches are in flight in the cluster, and all of them may have arrived at this stage.
    """
    if stage.loss is not None:
        # Its backward follows immediately.
        in_flight = 1
    parameters = sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in stage.parameters)
    nodes = prepared.costs.nodes
    saved = sum(nodes[node.name].saved_bytes for node in stage.nodes if node.name in nodes)
    received = sum(_bytes(value, prepared) for value in (*stage.receives, *stage.inputs))
    return Share(
        parameters=parameters,
        # The accumulated gradients exist in addition to those of the current microbatch.
        gradients=(2 if policy.within_accumulate else 1) * parameters,
        optimizer=2 * parameters,
        versions=int(policy.version_copies(in_flight, predicts=DEFAULT in PREDICTING) * parameters),
        activations=(in_flight if policy.keeps_activations else 1) * saved + limit * received,
    )


def _measure(stages: int, versions: str, in_flight: int | None, prepared: PreparedJob, bare: int) -> list[Row]:
    """A row for each stage of a run that is long enough to reach the maximum number in flight."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedSwarm(stages) as swarm:
        run = Path(folder, "run")
        job = _job(3 * max(stages + 1, in_flight or 0), versions, in_flight)
        summary = swarm.train(job, run=run, display=False).summary
        planned = next(event for event in read_events(run / "events.jsonl") if event["kind"] == "planned")
    rows = []
    graphs = split(prepared.captured.graph, planned["places"][0])
    limit = planned["in_flight"][0]
    for graph, ran in zip(graphs, summary.clusters[0].stages, strict=True):
        # A microbatch's staleness is the number of microbatches in flight at its forward, unless several of them make
        # one update.
        flying = ran.staleness.max + 1 if job.pipeline.accumulate == 1 else limit
        share = share_of(graph, prepared, flying, limit, POLICIES[versions])
        rows.append(_row(f"{versions}, stage {ran.stage} of {stages} ({ran.role})", flying, ran, share, bare))
        say(f"{rows[-1]['case']}: {rows[-1]['factor']:.2f} times its share")
    return rows


def _row(case: str, flying: int, ran: StageSummary, share: Share, bare: int) -> Row:
    return {
        "case": case,
        "in_flight": 1 if ran.role == "leaf" else flying,
        "parameters_mb": share.parameters / _MB,
        "gradients_mb": share.gradients / _MB,
        "optimizer_mb": share.optimizer / _MB,
        "versions_mb": share.versions / _MB,
        "activations_mb": share.activations / _MB,
        "share_mb": share.total / _MB,
        "planned_mb": SPARE * share.total / _MB,
        "bare_torch_mb": bare / _MB,
        "idle_provider_mb": (ran.baseline_memory_bytes or 0) / _MB,
        "peak_mb": ran.peak_memory_bytes / _MB,
        "factor": (ran.peak_memory_bytes - bare) / share.total,
    }


def _job(steps: int, versions: str = "stash", in_flight: int | None = None) -> ravnest.Job:
    torch.manual_seed(0)
    accumulate = _IN_FLIGHT if POLICIES[versions].within_accumulate else 1
    return ravnest.Job(
        model=GPT(LARGE),
        loss=next_token_loss,
        train_data=Repeated(token_batches(LARGE, _BATCH_SIZE), steps),
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
        checkpoint=ravnest.Checkpoint(every_seconds=None),
        pipeline=ravnest.Pipeline(versions=versions, in_flight=in_flight, accumulate=accumulate, split_backward=False),
    )


def _bare_import_bytes() -> int:
    """The peak memory of a new process that only imports torch."""
    code = "import torch; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM:')))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(shown.stdout.split()[1]) * 1024


def _bytes(value: ValueSpec, prepared: PreparedJob) -> int:
    sample, cost = prepared.captured.sample.get(value.name), prepared.costs.nodes.get(value.name)
    if sample is not None:
        return sample.nbytes
    return cost.output_bytes if cost is not None else 0


if __name__ == "__main__":
    sys.exit(main())
