"""Which microbatches a stage has applied: none of them is applied a second time, however often it comes.

A microbatch counts from the update on that its gradients went into. Where several make one update, those that are
summed and wait for the others do not count yet: if the stage forgets what is under way, they come again.
"""

import heapq
from collections.abc import Iterable
from typing import Final

REMEMBERED: Final = 4096
"""So many numbers, the newest. What comes again are microbatches since the last replica, which are far fewer."""


class Applied:
    """The newest that were applied, by number. Not thread-safe, as the stage is not."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers: set[int] = set()
        self._order: list[int] = []
        self._forgotten = -1
        """The newest of those that were applied and are not remembered any more."""
        self.add(numbers)
        if len(self._order) >= REMEMBERED:
            # Whoever told them has forgotten the others.
            self._forgotten = max(self._forgotten, self._order[0] - 1)

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._numbers

    def is_known(self, microbatch: int) -> bool:
        """Whether it is known if this one was applied: not of one that is older than what is remembered."""
        return microbatch > self._forgotten

    def add(self, microbatches: Iterable[int]) -> None:
        for microbatch in microbatches:
            if microbatch in self._numbers:
                continue
            self._numbers.add(microbatch)
            heapq.heappush(self._order, microbatch)
            if len(self._order) > REMEMBERED:
                oldest = heapq.heappop(self._order)
                self._numbers.remove(oldest)
                self._forgotten = max(self._forgotten, oldest)

    def numbers(self) -> list[int]:
        """All that are remembered, the oldest first."""
        return sorted(self._order)
