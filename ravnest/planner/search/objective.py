"""Objective of a search: the score of clusters that share neither a host nor the requester's line.

The formula is that of `totals`, with the longest averaging of any stage as a bound that all clusters keep to: so the
value of each cluster is independent of the others.
"""

import math
from collections.abc import Sequence

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Provider


def score_of(goal: Goal, samples: int, together: Table, clusters: Table, averaging_seconds: float) -> Table:
    """The score of this number of clusters, with `together` samples per second of all of them."""
    count = np.maximum(clusters, 1)
    taken = goal.average_share * _averaging(count) * _finite(averaging_seconds) / (goal.average_every * samples)
    score: Table = together / (1 + taken * together)
    return score


def cluster_bonus(goal: Goal, samples: int, together: float, clusters: int, averaging_seconds: float) -> float:
    """Value of one more cluster in addition to its own rate, in samples per second: each has fewer rounds."""
    if clusters < 2 or not averaging_seconds:
        return 0.0
    # The score is 1 / (1/together + taken): another sample per second changes 1/together, another cluster `taken`.
    fewer, more = (float(_averaging(np.array(float(c)))) for c in (clusters, clusters + 1))
    seconds = goal.average_share * _finite(averaging_seconds)
    return together**2 * (fewer - more) * seconds / (goal.average_every * samples)


def averaging_bounds(model: ModelCosts, providers: Sequence[Provider], steps: int) -> list[float]:
    """Bounds on the averaging time of a stage, from one without effect down to one that few providers could keep to."""
    lines = [min(p.up_bytes_per_second, p.down_bytes_per_second) for p in providers]
    finite = [line for line in lines if math.isfinite(line)]
    if not finite:
        return [math.inf]
    total = float(model.parameter_bytes[-1])
    stages = min(len(providers), model.max_stages)
    longest, shortest = total / min(finite), total / stages / max(finite)
    return [float(a) for a in np.geomspace(longest * 1.001, shortest, steps)]


def score(goal: Goal, cluster: Cluster) -> float:
    """The score of a single cluster: its rate, less the cost of staleness beyond the bound."""
    return cluster.samples_per_second * goal.worth(cluster.needed_in_flight)


def _averaging(clusters: Table) -> Table:
    taken: Table = 2 * (clusters - 1) / clusters**2
    return taken


def _finite(averaging_seconds: float) -> float:
    """The bound as a duration: an infinite one belongs to lines without a limit, on which averaging takes no time."""
    return averaging_seconds if math.isfinite(averaging_seconds) else 0.0
