"""Verdicts on stage failures: retry the stage, give its provider no stage any more, or end the run.

A failed provider does not end a run, because another provider can take its stage. A failure that follows the work to
other providers does end it, for example a microbatch that the model rejects: retries would never stop. The counts start
again whenever the run has completed a microbatch since the last failure. Pure: the caller passes the number of
completed microbatches.
"""

from collections import Counter
from typing import Final, NamedTuple

_MAX_PROVIDERS: Final = 2
"""When this many providers have failed with the same microbatch, the microbatch is the cause."""
_MAX_TRIES: Final = 3
"""Failures of one provider, with one microbatch or in all, while the run completes no microbatch."""
_MAX_LOST_LINKS: Final = 6
"""Links that one provider loses while the run completes no microbatch. Each time the coordinator rebuilds its cluster.
The limit is higher than for failures, because the other end of the link may be the cause."""


class FailureVerdict(NamedTuple):
    """Consequence of a failure. If both fields are empty, the coordinator retries."""

    ends_run: str
    """Why no provider can continue the run; empty when another one may."""
    set_aside: str
    """Why the provider gets no stage any more; empty when it may."""


_RETRY: Final = FailureVerdict("", "")


class FailureCounts:
    """Failures of one run, counted since the run last completed a microbatch."""

    def __init__(self) -> None:
        self._by_microbatch: dict[int, Counter[str]] = {}
        """For each microbatch, the number of failures of each provider."""
        self._failures: Counter[str] = Counter()
        """By provider, with any microbatch or none."""
        self._lost_links: Counter[str] = Counter()
        """By provider."""
        self._completed = -1
        """Completed microbatches at the last failure."""

    def failed(self, node_id: str, microbatch: int, completed: int) -> FailureVerdict:
        """Counts a stage failure at this provider. `microbatch` is below 0 when the stage failed before it had one, and
        `completed` is the number of microbatches that the run has completed."""
        self._forget_before(completed)
        self._failures[node_id] += 1
        if microbatch >= 0:
            nodes = self._by_microbatch.setdefault(microbatch, Counter())
            nodes[node_id] += 1
            if len(nodes) >= _MAX_PROVIDERS or nodes[node_id] >= _MAX_TRIES:
                return FailureVerdict(f"microbatch {microbatch} fails wherever it is tried", "")
        if self._failures[node_id] >= _MAX_TRIES:
            return FailureVerdict("", f"it failed {_MAX_TRIES} times, and nothing was completed in between")
        return _RETRY

    def lost_link(self, node_id: str, completed: int) -> FailureVerdict:
        """Counts a link between this provider's stage and a neighbour that could not be reconnected."""
        self._forget_before(completed)
        self._lost_links[node_id] += 1
        if self._lost_links[node_id] < _MAX_LOST_LINKS:
            return _RETRY
        return FailureVerdict("", f"it lost its links {_MAX_LOST_LINKS} times, and nothing was completed in between")

    def _forget_before(self, completed: int) -> None:
        if completed > self._completed:
            self._completed = completed
            for counts in (self._failures, self._by_microbatch, self._lost_links):
                counts.clear()
