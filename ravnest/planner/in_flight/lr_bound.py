"""How many microbatches may be in flight at the learning rate of the moment.

A stale gradient is applied to weights that have moved on since its forward, by as many updates as it is stale, each as
long as the learning rate is high. So what staleness costs goes with both: a pipeline that learns as well as synchronous
training with few in flight does so with many once the rate has fallen (`python -m benchmarks.quality`, and its table in
benchmarks/RESULTS.md). Near the peak of the rate no more are in flight than stages need to be busy on lines without
delay; as it falls, more, up to what the lines need.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster

CAUTIOUS_STALENESS: Final = 7
"""Updates of staleness that cost little at the highest learning rate: what eight stages have on lines without delay."""

_MIN_SHARE: Final = 1e-3


def cautious_flight(stages: int, accumulate: int, rate_share: float) -> int:
    """As many as may be in flight in a cluster of so many stages while the learning rate is this share of its highest.

    Where `accumulate` microbatches make an update, as many as that are never too stale.
    """
    late = max(CAUTIOUS_STALENESS, accumulate) / max(rate_share, _MIN_SHARE)
    return max(stages, 1 + int(late))


def slowed_by_caution(cluster: Cluster, allowed: Mapping[int, float]) -> float:
    """Which part of the cluster's rate is left in a run of which these shares of microbatches are trained on with at
    most so many in flight; 1 where nothing is known of it."""
    planned = cluster.samples_per_second
    together = sum(allowed.values())
    if not together or not planned:
        return 1.0
    rates = {most: replace(cluster, in_flight=min(most, cluster.in_flight)).samples_per_second for most in allowed}
    # Exactly 1 where no rate is another.
    return together / sum(share * (planned / rates[most]) for most, share in allowed.items())
