"""Report of a hosted stage to the coordinator, as the message that travels."""

from collections.abc import Mapping
from typing import Final

from ravnest.engine.finite_checks.origin import StageDiagnosis
from ravnest.engine.telemetry.activity import Activity as EngineActivity
from ravnest.engine.worker import StageWorker
from ravnest.net.v1.control_pb2 import Activity, Missing, ProviderMessage, Report, Traced

MAX_STALENESS_TOLD: Final = 4095
"""Length of the staleness distribution in a report. The maximum is reported separately."""


def worker_report(deployment: str, worker: StageWorker) -> Report:
    """The report of what a worker has done so far, without the fields that its links and rings fill in."""
    counters = worker.counters
    staleness, spent = dict(counters.staleness), dict(counters.seconds)
    return Report(
        deployment=deployment,
        updates=counters.updates,
        staleness_sum=sum(k * n for k, n in staleness.items()),
        staleness_max=max(staleness, default=0),
        staleness_counts=staleness_counts(staleness),
        busy_seconds=counters.busy_seconds,
        forward_seconds=spent.get("forward", 0.0) + spent.get("lookup", 0.0),
        backward_seconds=sum(spent.get(kind, 0.0) for kind in ("backward", "weights", "rows")),
        update_seconds=spent.get("update", 0.0),
        in_flight=worker.limit or 0,
        flight_seconds=worker.flight_seconds,
        ready=worker.ready,
        activity=_activity(worker.activity()),
        forwards=counters.forwards,
        backwards=counters.backwards,
        training_seconds=counters.training.seconds,
        training_busy_seconds=counters.training.busy_seconds,
    )


def staleness_counts(counts: Mapping[int, int]) -> list[int]:
    """The number of updates of each staleness from 0 on; the last entry includes all that are staler."""
    length = min(max(counts, default=-1), MAX_STALENESS_TOLD)
    updates_by_staleness = [0] * (length + 1)
    for staleness, updates in counts.items():
        updates_by_staleness[min(staleness, length)] += updates
    return updates_by_staleness


def trace_of(deployment: str, microbatch: int, diagnosis: StageDiagnosis) -> ProviderMessage:
    """The message about values of a microbatch that are not finite."""
    return ProviderMessage(
        traced=Traced(
            deployment=deployment,
            microbatch=microbatch,
            received=diagnosis.forward.received,
            sent=diagnosis.forward.sent,
            kind=diagnosis.forward.kind,
            where=diagnosis.forward.where,
            gradients_received=diagnosis.gradients_received,
            gradients_sent=diagnosis.gradients_sent,
            steep=diagnosis.steep,
        )
    )


def _activity(activity: EngineActivity) -> Activity:
    missing = [Missing(what=m.what, microbatch=m.microbatch, count=m.count) for m in activity.missing]
    return Activity(kind=activity.kind, microbatch=activity.microbatch, seconds=activity.seconds, missing=missing)
