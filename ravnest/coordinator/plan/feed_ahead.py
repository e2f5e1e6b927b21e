"""Number of microbatches that a cluster is fed ahead, so that no stage waits for the coordinator."""

import math
from collections.abc import Mapping

from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.problem import Provider

_AHEAD = 2
_MAX_AHEAD = 32
"""Maximum that a stage may be told to keep."""
_AWAY_SECONDS = 2.0
_AWAY_BYTES = 8 << 20
"""Time that a cluster can go on without its coordinator, if the microbatches for it are no larger than this."""


def feed_ahead(cluster: Cluster, providers: Mapping[str, Provider]) -> int:
    """Number of microbatches fed beyond those in flight, at the planned rate. If the coordinator is on another machine
    and they are small, there are enough to go on for a while without it."""
    needed = ahead_of(feed_seconds(cluster, providers), cluster.period_seconds)
    fed = _fed(cluster)
    if not any(providers[stage.provider].latency_seconds for stage in fed):
        return needed
    while_away = min(_AWAY_SECONDS / cluster.period_seconds, _AWAY_BYTES / max(1.0, *(s.fed_bytes for s in fed)))
    return max(needed, _AHEAD + math.ceil(min(_MAX_AHEAD, while_away)))


def ahead_of(feed_seconds: float, period_seconds: float) -> int:
    """Number fed ahead so that no stage waits for the coordinator: those trained on between a report of a completed
    microbatch and the arrival of the next one, and a few more."""
    return _AHEAD + math.ceil(min(_MAX_AHEAD, feed_seconds / period_seconds))


def feed_seconds(cluster: Cluster, providers: Mapping[str, Provider]) -> float:
    """Time for a report of a completed microbatch to arrive, and for the next one to reach the slowest stage to be
    fed."""
    return max(
        2 * providers[stage.provider].latency_seconds
        + stage.fed_bytes / providers[stage.provider].down_bytes_per_second
        for stage in _fed(cluster)
    )


def _fed(cluster: Cluster) -> list[StageCost]:
    """Stages that the coordinator feeds: always the root, which is at least told of each microbatch."""
    return [stage for number, stage in enumerate(cluster.stages) if number == 0 or stage.fed_bytes]
