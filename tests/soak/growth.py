"""Whether a series of measurements grows: a slope that stands noise, and a limit with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

WARM_UP: Final = 1 / 3
"""The part of a series that does not count: allocators, pools of threads and caches fill up while a run is young."""

_MAX_POINTS: Final = 240
"""Slopes are taken between all pairs of so many medians, at most."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much something may grow from the end of the warm-up to the end of the series, and why so much."""

    amount: float
    reason: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What has become of one figure of one process."""

    process: str
    what: str
    first: float
    """The median of the first third after the warm-up."""
    last: float
    """The median of the last third."""
    per_hour: float
    """Theil and Sen's slope after the warm-up: the median of the slopes between all pairs of measurements."""
    over_window: float
    """That slope, over the time it was measured."""
    limit: Limit

    @property
    def grows(self) -> bool:
        """Only where both say so: a single step up has no slope, and a saw-tooth may end on a high note."""
        return min(self.over_window, self.last - self.first) > self.limit.amount

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.process}: {self.first:,.1f} to {self.last:,.1f}, {self.per_hour:+,.2f} per hour, "
            f"{self.over_window:+,.2f} while it was measured (limit {self.limit.amount:g}: {self.limit.reason})"
        )


def growth(process: str, what: str, series: Sequence[tuple[float, float]], limit: Limit) -> Growth:
    """Looks at pairs of seconds and a value, in order; ValueError when there are too few to tell anything."""
    begin, end = series[0][0], series[-1][0]
    counted = [point for point in series if point[0] >= begin + WARM_UP * (end - begin)]
    if len(counted) < 9:
        raise ValueError(f"{len(counted)} measurements of {what} after the warm-up tell nothing: take 9 or more")
    third = len(counted) // 3
    slope = theil_sen(_thinned(counted))
    return Growth(
        process=process,
        what=what,
        first=median(value for _, value in counted[:third]),
        last=median(value for _, value in counted[-third:]),
        per_hour=3600 * slope,
        over_window=slope * (counted[-1][0] - counted[0][0]),
        limit=limit,
    )


def theil_sen(series: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs: up to a quarter of the points may be anything."""
    return median((later - earlier) / (to - at) for (at, earlier), (to, later) in combinations(series, 2) if to > at)


def _thinned(series: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours, where there are too many for all pairs."""
    width = -(-len(series) // _MAX_POINTS)
    groups = [series[start : start + width] for start in range(0, len(series), width)]
    return [(median(at for at, _ in group), median(value for _, value in group)) for group in groups]
