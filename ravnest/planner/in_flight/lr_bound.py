"""Bound on the microbatches in flight that follows the learning rate.

A stale gradient is applied to weights that have moved since its forward: by as many updates as it is stale, each in
proportion to the learning rate. So the cost of staleness grows with both: a pipeline that learns as well as synchronous
training with few in flight does so with many once the rate has fallen (`python -m benchmarks.quality`, and its table in
benchmarks/RESULTS.md). Near the peak of the rate, only as many are in flight as keep stages busy on lines without
delay; as the rate falls, more are allowed, up to the number that the lines need.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ravnest.planner.cluster import Cluster

CAUTIOUS_STALENESS: Final = 7
"""Staleness in updates that costs little at the highest learning rate: that of eight stages on lines without delay."""

_MIN_SHARE: Final = 1e-3


def cautious_flight(stages: int, accumulate: int, rate_share: float) -> int:
    """The number allowed in flight in a cluster while the learning rate is this share of its highest.

    The `accumulate` microbatches of one update are always allowed.
    """
    late = max(CAUTIOUS_STALENESS, accumulate) / max(rate_share, _MIN_SHARE)
    return max(stages, 1 + int(late))


def slowed_by_caution(cluster: Cluster, allowed: Mapping[int, float]) -> float:
    """Share of the cluster's rate that is left over a run. `allowed` maps a bound on the number in flight to the number
    of the run's updates made under it; 1 where it is empty."""
    planned = cluster.samples_per_second
    together = sum(allowed.values())
    if not together or not planned:
        return 1.0
    rates = {most: replace(cluster, in_flight=min(most, cluster.in_flight)).samples_per_second for most in allowed}
    # Exactly 1 where all rates are the same.
    return together / sum(share * (planned / rates[most]) for most, share in allowed.items())
