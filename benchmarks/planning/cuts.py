"""Cuts that the planner makes in models of the size that people train: `python -m benchmarks.planning.cuts`.

Each model is captured and profiled, and planned for 2, 3 and 4 stages: in an embedded swarm (all providers on one
machine with 2 cores), and on as many machines of their own behind lines of 100 Mbit/s. Nothing is trained; the figures
are those of the plan. With `--costs DIR` the profiles are kept there, so that two versions plan from the same costs.
"""

import hashlib
import sys
import time
from collections.abc import Iterator

from benchmarks.planning.models import CASES
from benchmarks.report import Row, arguments, finish, say
from ravnest.coordinator.plan.plan_run import goal_of, plan_members
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.cores import fair_share
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Network, Provider, Requester
from ravnest.preview.module_names import Parts

_CORES = 2
_GIB = 2**30
_STAGES = (2, 3, 4)
_HOST = "here"


def main() -> int:
    options = {"costs": "folder that keeps the profiles of the models"}
    given = arguments("planning.cuts", "The cuts that the planner makes in five models.", options=options)
    rows: list[Row] = []
    for name, case in CASES.items():
        if given.quick and name != "recommender":
            continue
        say(name)
        kept = None if given.costs is None else given.costs / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.json"
        prepared = prepare(case.job(), 1, None, lambda phase: None, kept=kept)
        for stages in _STAGES:
            for where in ("one machine", "100 Mbit/s"):
                rows += _rows(f"{name}, {stages} stages, {where}", prepared, stages, where)
    return finish("planning.cuts", given, rows, [])


def _rows(case: str, prepared: PreparedJob, stages: int, where: str) -> Iterator[Row]:
    if where == "one machine":
        providers = [_embedded(number, stages) for number in range(stages)]
        network = Network(requester=Requester(_HOST))
    else:
        providers = [_apart(number) for number in range(stages)]
        network = Network()
    began = time.process_time()
    plan = plan_members(prepared, providers, network, goal_of(prepared.job, stages, 1))
    seconds = time.process_time() - began
    yield from rows_of(case, plan, Parts.of(prepared.captured.graph), seconds)


def rows_of(case: str, plan: Plan, parts: Parts, seconds: float) -> Iterator[Row]:
    """A row for each stage of the first cluster."""
    [cluster] = plan.clusters
    model, rate = plan.basis.model, plan.predicted_samples_per_second
    for stage in cluster.stages:
        at = model.places.index(stage.cost.start)
        crossing = float(model.forward_bytes[at] + model.backward_bytes[at])
        yield {
            "case": case if not stage.stage else "",
            "stage": parts.between(stage.cost.start, stage.cost.end).title,
            "parameters": stage.parameters,
            "memory_mib": round(stage.cost.memory_bytes / 2**20),
            "received_mib": round(crossing / 2**20, 2),
            "compute_ms": round(1e3 * stage.cost.compute_seconds, 1),
            "samples_per_second": rate if not stage.stage else None,
            "planning_seconds": round(seconds, 2) if not stage.stage else None,
        }


def _embedded(number: int, providers: int) -> Provider:
    return Provider(
        name=f"provider-{number}",
        memory_bytes=24 * _GIB // providers,
        host=_HOST,
        cores=_CORES,
        threads=fair_share(_CORES, providers, number),
    )


def _apart(number: int) -> Provider:
    rate = 100e6 / 8
    return Provider(
        name=f"provider-{number}",
        memory_bytes=16 * _GIB,
        up_bytes_per_second=rate,
        down_bytes_per_second=rate,
        latency_seconds=0.01,
    )


if __name__ == "__main__":
    sys.exit(main())
