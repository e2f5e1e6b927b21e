"""When the next checkpoint is begun, so that never more than one interval is lost: pure arithmetic.

Training goes on while a checkpoint travels to the disk, and until it is there a crash goes back to the one before. So
the next is begun early, by as much as the last ones took to be written; and where that does not suffice (a disk that is
slow for once), training waits for it.
"""

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of how long checkpoints take, and how fast updates come meanwhile."""

    written_seconds: float = 0.0
    """From the announcement to the disk: of the last, or of slower ones before it, the less the longer ago."""
    updates_per_second: float = 0.0
    """While training was not held up for a checkpoint."""

    def wrote(self, seconds: float) -> Self:
        """After a checkpoint that took so long."""
        return replace(self, written_seconds=max(seconds, _FADING * self.written_seconds))

    def trained(self, updates: int, seconds: float) -> Self:
        """After so many updates between two checkpoints, in so much time."""
        return self if updates <= 0 else replace(self, updates_per_second=updates / max(seconds, _MOMENT_SECONDS))

    def updates_between(self, every: int) -> int:
        """After how many updates the next one is begun where `every` of them may be lost, at most.

        At least half of them: where writing takes longer than that, training waits for it anyway, and the more often
        it is done the more."""
        early = math.ceil(self.written_seconds * self.updates_per_second)
        return max(every - early, (every + 1) // 2)

    def seconds_between(self, every: float) -> float:
        """After how long the next one is begun where `every` seconds may be lost, and no more unless writing takes
        longer than half of that."""
        return max(every - self.written_seconds, every / 2)


_FADING = 0.8
_MOMENT_SECONDS = 1e-6
