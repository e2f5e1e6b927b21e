"""What a search compares: the score of clusters that share neither a host nor the requester's line, from few numbers.

The same formula as in totals, with the longest averaging of any stage as a bound that all clusters keep to: so the
worth of each cluster is known by itself, and clusters can be put together like stones.
"""

import math
from collections.abc import Sequence

import numpy as np

from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Provider


def score_of(goal: Goal, samples: int, together: Table, clusters: Table, averaging_seconds: float) -> Table:
    """The score of so many clusters that make so many samples a second together, by themselves."""
    count = np.maximum(clusters, 1)
    taken = goal.average_share * _averaging(count) * _finite(averaging_seconds) / (goal.average_every * samples)
    score: Table = together / (1 + taken * together)
    return score


def cluster_bonus(goal: Goal, samples: int, together: float, clusters: int, averaging_seconds: float) -> float:
    """What one more cluster is worth beside its own rate, in samples a second: rounds become rarer for each."""
    if clusters < 2 or not averaging_seconds:
        return 0.0
    # Score is 1 / (1/together + taken): one more sample a second changes 1/together, one more cluster changes taken.
    fewer, more = (float(_averaging(np.array(float(c)))) for c in (clusters, clusters + 1))
    seconds = goal.average_share * _finite(averaging_seconds)
    return together**2 * (fewer - more) * seconds / (goal.average_every * samples)


def averaging_bounds(model: ModelCosts, providers: Sequence[Provider], steps: int) -> list[float]:
    """Bounds on how long the averaging of a stage may take, from what never binds down to what few could keep to."""
    lines = [min(p.up_bytes_per_second, p.down_bytes_per_second) for p in providers]
    finite = [line for line in lines if math.isfinite(line)]
    if not finite:
        return [math.inf]
    total = float(model.parameter_bytes[-1])
    stages = min(len(providers), model.max_stages)
    longest, shortest = total / min(finite), total / stages / max(finite)
    return [float(a) for a in np.geomspace(longest * 1.001, shortest, steps)]


def _averaging(clusters: Table) -> Table:
    taken: Table = 2 * (clusters - 1) / clusters**2
    return taken


def _finite(averaging_seconds: float) -> float:
    """A bound of infinity is that of providers without a limit on their lines, whose averaging takes no time."""
    return averaging_seconds if math.isfinite(averaging_seconds) else 0.0
