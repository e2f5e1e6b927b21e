"""The phase of a round in which owners that are behind receive the newest anchor, as the coordinator sees it.

An anchor travels uncoded, so it takes far longer than a reduce. An owner to which pieces still arrive gets more time:
otherwise it would be left out in every round, and each round would send it an anchor that it cannot use.
"""

from collections.abc import Sequence

from ravnest.averaging.deadlines import PhaseTime
from ravnest.averaging.reduce_attempt import MAX_EXTENSIONS


class CatchingUp:
    """The wait for owners that are behind. Their donations may begin while other owners still join."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._caught_up = 0
        self._cut_off = 0
        self._pieces: dict[str, int] = {}
        self._advanced: set[str] = set()
        self._extensions = 0

    def joined(self, now: float) -> None:
        """All owners have joined or are left out: from now on the round waits."""
        self._began = now

    def waited(self, now: float) -> float:
        """The seconds that the round has waited so far."""
        return now - self._began

    def add_progress(self, node: str, pieces: int) -> None:
        """An owner that is behind has received this many pieces from its donor."""
        # The count begins again when another donor takes over.
        if pieces != self._pieces.get(node, 0):
            self._pieces[node] = pieces
            self._advanced.add(node)

    def caught_up(self) -> None:
        """An owner has the newest anchor."""
        self._caught_up += 1

    def give_up(self, behind: Sequence[str]) -> list[str]:
        """Time is up: the owners to leave out. The others have received pieces since the last time and get more."""
        may_extend = self._extensions < MAX_EXTENSIONS
        late = [node for node in behind if not may_extend or node not in self._advanced]
        self._extensions += 1
        self._advanced.clear()
        self._cut_off += len(late)
        return late

    def took(self, now: float) -> PhaseTime | None:
        """The time of this phase; None if no owner has caught up or was too late."""
        if not self._caught_up and not self._cut_off:
            return None
        return PhaseTime(self.waited(now), self._cut_off)
