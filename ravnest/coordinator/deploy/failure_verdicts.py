"""What stages fail with: whether it helps to give one to somebody else, or whether it fails wherever it is tried.

A machine that fails is no reason to end a run, and what fails everywhere is no reason to try for ever: a batch that the
model cannot take, a stage that nobody can build. Pure: what has been completed is the caller's to say.
"""

from collections import Counter
from typing import Final, NamedTuple

_MACHINES: Final = 2
"""That fail with the same microbatch: it is not the machine."""
_TRIES: Final = 3
"""Of one machine, with the same microbatch or without that anything was completed in between."""
_LINKS: Final = 6
"""Links that one machine loses without that; each time its cluster is formed anew. The other end may be to blame."""


class Judged(NamedTuple):
    """What follows from a failure."""

    ends_run: str
    """Why nobody can go on; empty where others may."""
    set_aside: str
    """Why this machine gets no stage any more; empty where it may."""


class FailureCounts:
    """Of one run."""

    def __init__(self) -> None:
        self._with: dict[int, Counter[str]] = {}
        """By microbatch, who has failed with it, and how often."""
        self._in_vain: Counter[str] = Counter()
        """How often each has failed since something was completed."""
        self._links: Counter[str] = Counter()
        self._completed = -1

    def failed(self, node_id: str, microbatch: int, completed: int) -> Judged:
        """A stage has failed at its machine, with a microbatch or (below 0) before it had one; so many had been
        completed by then."""
        self._forget_before(completed)
        self._in_vain[node_id] += 1
        if microbatch >= 0:
            nodes = self._with.setdefault(microbatch, Counter())
            nodes[node_id] += 1
            if len(nodes) >= _MACHINES or nodes[node_id] >= _TRIES:
                return Judged(f"microbatch {microbatch} fails wherever it is tried", "")
        if self._in_vain[node_id] >= _TRIES:
            return Judged("", f"it failed {_TRIES} times, and nothing was completed in between")
        return Judged("", "")

    def lost_link(self, node_id: str, completed: int) -> Judged:
        """A stage has lost its link to a neighbour for good."""
        self._forget_before(completed)
        self._links[node_id] += 1
        if self._links[node_id] < _LINKS:
            return Judged("", "")
        return Judged("", f"it lost its links {_LINKS} times, and nothing was completed in between")

    def _forget_before(self, completed: int) -> None:
        if completed > self._completed:
            self._completed = completed
            for counts in (self._in_vain, self._with, self._links):
                counts.clear()
