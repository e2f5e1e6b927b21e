"""JSON form of a plan for other programs, in seconds and bytes. docs/planning.md explains each field."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.explain.explain import ratio
from ravnest.planner.plan import role_of
from ravnest.planner.problem import Provider
from ravnest.planner.recovery.state_periods import StatePeriods
from ravnest.planner.rings.rings import Ring
from ravnest.preview.dry_run import DryRun

FORMAT: Final = 1
"""Format version. It increases when a field changes its meaning or is removed; new fields do not change it."""


def plan_json(dry: DryRun) -> dict[str, Any]:
    """The whole plan. A quantity without a limit is null."""
    plan, goal = dry.plan, dry.goal
    return {
        "format": FORMAT,
        "job": dry.title,
        "predicted_samples_per_second": plan.steady_samples_per_second,
        "run_samples_per_second": plan.predicted_samples_per_second,
        "score": plan.score,
        "limit": plan.limit,
        "averaging_seconds": plan.averaging_seconds,
        "average_every": goal.average_every,
        "state": None if dry.state is None else _state(dry.state),
        "versions": goal.versions,
        "samples_per_microbatch": dry.model.samples,
        "model": {
            "parameters": dry.parts.count,
            "parameter_bytes": int(dry.model.parameter_bytes[-1]),
            "max_stages": dry.model.max_stages,
        },
        "clusters": [_cluster(dry, number, cluster) for number, cluster in enumerate(dry.clusters)],
        "standbys": list(plan.standbys),
        "rings": [_ring(dry, ring) for ring in dry.rings],
        "reasons": list(dry.explanation.sentences) if dry.explanation is not None else [],
        "what_ifs": [asdict(one) for one in dry.explanation.what_ifs] if dry.explanation is not None else [],
        "providers": {
            provider.name: {
                "device": dry.devices.get(provider.name, ""),
                "host": provider.host,
                "memory_bytes": provider.memory_bytes,
                "compute_speed": provider.compute_speed,
                "memory_speed": provider.memory_speed,
                "up_bytes_per_second": _finite(provider.up_bytes_per_second),
                "down_bytes_per_second": _finite(provider.down_bytes_per_second),
                "latency_seconds": provider.latency_seconds,
                "reachable": provider.reachable,
                "reliability": provider.reliability,
            }
            for provider in dry.providers.values()
        },
    }


def _state(state: StatePeriods) -> dict[str, Any]:
    return {
        "at_most_lost_seconds": state.at_most_lost_seconds,
        "replica_seconds": state.replica_seconds,
        "checkpoint_seconds": state.checkpoint_seconds,
        "told": list(state.sentences()),
    }


def _cluster(dry: DryRun, number: int, cluster: Cluster) -> dict[str, Any]:
    return {
        "id": number,
        "samples_per_second": dry.plan.rates[number],
        "alone_samples_per_second": cluster.samples_per_second,
        "in_flight": cluster.in_flight,
        "staleness": dry.staleness(cluster),
        "period_seconds": cluster.period_seconds,
        "busiest_seconds": cluster.busiest_seconds,
        "round_trip_seconds": cluster.round_trip_seconds,
        "limit": cluster.limit,
        "likeness": _likeness([dry.providers[name] for name in cluster.providers]),
        "stages": [_stage(dry, cluster, k, stage) for k, stage in enumerate(cluster.stages)],
    }


def _likeness(members: Sequence[Provider]) -> dict[str, Any]:
    """The best of a cluster's machines against the worst, in speed and in their lines; 1 if they are equal."""
    line = ratio([min(p.up_bytes_per_second, p.down_bytes_per_second) for p in members])
    return {"speed": ratio([p.compute_speed for p in members]), "line": _finite(line)}


def _stage(dry: DryRun, cluster: Cluster, number: int, stage: StageCost) -> dict[str, Any]:
    part = dry.parts.between(stage.start, stage.end)
    lines = dry.line_before(cluster, number)
    link = None
    if lines is not None:
        there, back = lines
        link = {
            "bytes_per_second": _finite(there.bytes_per_second),
            "back_bytes_per_second": _finite(back.bytes_per_second),
            "round_trip_seconds": there.latency_seconds + back.latency_seconds,
            "relayed": dry.relayed(cluster, number),
            "codec": stage.codec,
            "codec_reason": stage.codec_reason,
        }
    return {
        "provider": stage.provider,
        "stage": number,
        "role": role_of(number, len(cluster.stages)),
        "start": stage.start,
        "end": stage.end,
        "first_parameter": part.first,
        "last_parameter": part.last,
        "parameters": part.parameters,
        "parameter_bytes": int(stage.parameter_bytes),
        "memory_bytes": math.ceil(stage.memory_bytes),
        "provider_memory_bytes": dry.providers[stage.provider].memory_bytes,
        "seconds": stage.seconds,
        "compute_seconds": stage.compute_seconds,
        "up_seconds": stage.up_seconds,
        "down_seconds": stage.down_seconds,
        "line_seconds": stage.line_seconds,
        "trip_seconds": stage.trip_seconds,
        "fed_bytes": int(stage.fed_bytes),
        "limit": stage.limit,
        "link": link,
    }


def _ring(dry: DryRun, ring: Ring) -> dict[str, Any]:
    part = dry.parts.between(ring.start, ring.end)
    return {
        "start": ring.start,
        "end": ring.end,
        "first_parameter": part.first,
        "last_parameter": part.last,
        "parameters": part.parameters,
        "parameter_bytes": int(ring.parameter_bytes),
        "owners": list(ring.owners),
        "slowest_bytes_per_second": _finite(ring.slowest_bytes_per_second),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
