"""How many microbatches a cluster is fed ahead: enough that no stage waits for the coordinator."""

import math
from collections.abc import Mapping

from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.problem import Provider

_AHEAD = 2
_MAX_AHEAD = 32
"""More would wait at a stage than it may be told to keep."""
_AWAY_SECONDS = 2.0
_AWAY_BYTES = 8 << 20
"""For so long a cluster can go on without its coordinator, if that is no more than so many bytes."""


def feed_ahead(cluster: Cluster, providers: Mapping[str, Provider]) -> int:
    """How many microbatches are fed beyond those in flight, at the planned rate. Where the coordinator is on another
    machine, enough to go on with for a while when it is gone, if they are small."""
    needed = ahead_of(feed_seconds(cluster, providers), cluster.period_seconds)
    fed = _fed(cluster)
    if not any(providers[stage.provider].latency_seconds for stage in fed):
        return needed
    while_away = min(_AWAY_SECONDS / cluster.period_seconds, _AWAY_BYTES / max(1.0, *(s.fed_bytes for s in fed)))
    return max(needed, _AHEAD + math.ceil(min(_MAX_AHEAD, while_away)))


def ahead_of(feed_seconds: float, period_seconds: float) -> int:
    """How many are fed ahead so that no stage ever waits for the coordinator: as many as are trained on while word of a
    completed one comes and the next goes out, and a few."""
    return _AHEAD + math.ceil(min(_MAX_AHEAD, feed_seconds / period_seconds))


def feed_seconds(cluster: Cluster, providers: Mapping[str, Provider]) -> float:
    """Until word of a completed microbatch has come and the next is with the stage that waits longest for it."""
    return max(
        2 * providers[stage.provider].latency_seconds
        + stage.fed_bytes / providers[stage.provider].down_bytes_per_second
        for stage in _fed(cluster)
    )


def _fed(cluster: Cluster) -> list[StageCost]:
    """Stages that the coordinator sends something of each microbatch: the root in any case, if only word of it."""
    return [stage for number, stage in enumerate(cluster.stages) if number == 0 or stage.fed_bytes]
