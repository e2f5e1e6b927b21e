"""State outlook: how often there are replicas and checkpoints, and what a loss would cost, as the user is told it."""

from collections.abc import Callable, Iterable

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.tracker import ReplicaTracker
from ravnest.planner.recovery.state_periods import StatePeriods

_CHANGE = 1.25
"""A period is told again once it has changed by this factor."""


class StateOutlook:
    """The outlook of one deployment. Call `look` whenever sizes, lines or clusters may have changed."""

    def __init__(
        self,
        replicas: ReplicaTracker,
        tell: Callable[[StatePeriods], None],
        wished_seconds: float | None,
        requester_bytes_per_second: float,
    ) -> None:
        """`tell` is called with periods that are new to the user. `wished_seconds` is `checkpoint.every_seconds`, the
        rate that of the requester's downlink."""
        self._replicas = replicas
        self._tell = tell
        self._wished_seconds = wished_seconds
        self._rate = requester_bytes_per_second
        self._told: StatePeriods | None = None

    def look(self, clusters: Iterable[ClusterRun]) -> StatePeriods | None:
        """The periods of the cluster that would lose most, told if they are new; None without a cluster."""
        found = [self._replicas.periods(cluster, self._wished_seconds, self._rate) for cluster in clusters]
        if not found:
            return None
        worst = max(found, key=lambda periods: (periods.at_most_lost_seconds, periods.checkpoint_seconds or 0.0))
        if self._told is None or has_changed(self._told, worst):
            self._told = worst
            self._tell(worst)
        return worst


def has_changed(before: StatePeriods, now: StatePeriods) -> bool:
    """Whether a user who was told one should be told the other."""
    pairs = (
        (before.at_most_lost_seconds, now.at_most_lost_seconds),
        (before.checkpoint_seconds or 0.0, now.checkpoint_seconds or 0.0),
    )
    return any(max(pair) > _CHANGE * min(pair) for pair in pairs)
