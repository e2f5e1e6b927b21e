"""Record of the microbatches that a stage has applied, so that none is applied twice when it is replayed.

A microbatch is applied once an update includes its gradients. Microbatches whose gradients are only summed are not: if
the stage discards its unapplied work, they are replayed.

A leaf that looks rows up for the root applies a microbatch in two parts: the gradients of its own pass, and later those
of the rows, which come back from the root. It has applied the microbatch once both are part of updates.
"""

import heapq
from collections.abc import Iterable
from typing import Final

REMEMBERED: Final = 16384
"""Number of microbatches remembered, the newest ones. Replays begin at the last replica, which is far more recent."""


class Applied:
    """The newest applied microbatches by number. Not thread-safe, like the stage."""

    def __init__(
        self, numbers: Iterable[int] = (), remembered: int = REMEMBERED, without_rows: Iterable[int] = ()
    ) -> None:
        self.without_rows = set(without_rows)
        """Microbatches of which only the gradients of the stage's own pass were applied."""
        self._remembered = remembered
        self._numbers: set[int] = set()
        self._order: list[int] = []
        self._forgotten = -1
        """The newest applied microbatch that is no longer remembered."""
        self.add(numbers)
        if len(self._order) >= remembered:
            # A full list comes from a stage that has forgotten older ones.
            self._forgotten = max(self._forgotten, self._order[0] - 1)

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._numbers

    def has_own(self, microbatch: int) -> bool:
        """Whether the gradients of the stage's own pass over the microbatch were applied."""
        return microbatch in self._numbers or microbatch in self.without_rows

    def is_known(self, microbatch: int) -> bool:
        """Whether this record can tell if the microbatch was applied; False if it is older than those remembered."""
        return microbatch > self._forgotten

    def add(self, microbatches: Iterable[int]) -> None:
        """Notes microbatches that were applied, with their rows if they have any."""
        for microbatch in microbatches:
            self.without_rows.discard(microbatch)
            if microbatch in self._numbers:
                continue
            self._numbers.add(microbatch)
            heapq.heappush(self._order, microbatch)
            if len(self._order) > self._remembered:
                oldest = heapq.heappop(self._order)
                self._numbers.remove(oldest)
                self._forgotten = max(self._forgotten, oldest)

    def numbers(self) -> list[int]:
        """The remembered microbatches, oldest first."""
        return sorted(self._order)
