"""One attempt to reduce a ring, as the coordinator sees it: digests, progress, and what to do when time is up."""

from typing import Final

from ravnest.averaging.stragglers import Stragglers, find_stragglers

SILENT_SECONDS: Final = 5.0
"""Timeout for a member's progress reports. A healthy member sends one every second."""
MAX_EXTENSIONS: Final = 20
"""Maximum number of times that an attempt in which pieces still arrive gets more time."""


class ReduceAttempt:
    """The members of an attempt and their reports. Attempt 0 stands for none: it has no members."""

    def __init__(self, number: int, members: tuple[str, ...], now: float) -> None:
        self.number = number
        self.members = members
        self.began = now
        self.digests: dict[str, int] = {}
        """The checksum of the mean, of each member that has it."""
        self._progress: dict[str, tuple[int, float]] = {}
        self._pieces = 0
        self._extensions = 0

    def concerns(self, node: str, number: int) -> bool:
        """Whether a report of this node about this attempt counts."""
        return number == self.number and node in self.members

    @property
    def is_reduced(self) -> bool:
        return len(self.digests) == len(self.members)

    @property
    def agrees(self) -> bool:
        """Whether all digests are the same."""
        return len(set(self.digests.values())) == 1

    def add_progress(self, node: str, pieces: int, now: float) -> None:
        """A member has received this many pieces. All members report that, also those that have finished."""
        self._progress[node] = pieces, now

    def extend(self, now: float) -> bool:
        """Whether the attempt gets more time: all members report, and more pieces have arrived since the last time."""
        pieces = sum(count for count, _ in self._progress.values()) + len(self.digests)
        healthy = len(self.digests.keys() | self._recent(now).keys()) == len(self.members)
        if not healthy or pieces <= self._pieces or self._extensions == MAX_EXTENSIONS:
            return False
        self._pieces = pieces
        self._extensions += 1
        return True

    def remaining_seconds(self, now: float, expected_pieces: int) -> float | None:
        """The time that the slowest member still needs at its rate so far; None if that cannot be told.

        `expected_pieces` is the number that each member receives.
        """
        waiting = [count for node, count in self._recent(now).items() if node not in self.digests]
        if not waiting or not min(waiting) or expected_pieces <= min(waiting):
            return None
        return (now - self.began) * (expected_pieces / min(waiting) - 1)

    def stragglers(self, now: float) -> Stragglers:
        """The members that hold the attempt up."""
        return find_stragglers(self.members, self.digests, self._recent(now))

    def _recent(self, now: float) -> dict[str, int]:
        return {node: pieces for node, (pieces, at) in self._progress.items() if now - at <= SILENT_SECONDS}
