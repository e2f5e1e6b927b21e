"""Checkpoint pace: the arithmetic of when to begin the next checkpoint, so that at most one interval is lost.

Training goes on while a checkpoint is written, and a crash during that time falls back to the one before. The next
checkpoint is therefore begun early, by the time that the last ones took to be written.
"""

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """How long checkpoints take to be written, and how fast updates come meanwhile."""

    written_seconds: float = 0.0
    """Time from the announcement to the disk: of the last checkpoint, or of a slower one before it, which counts less
    with each checkpoint since."""
    updates_per_second: float = 0.0
    """The rate while training did not wait for a checkpoint."""

    def wrote(self, seconds: float) -> Self:
        """The pace after a checkpoint that took this long."""
        return replace(self, written_seconds=max(seconds, _FADING * self.written_seconds))

    def trained(self, updates: int, seconds: float) -> Self:
        """The pace after this number of updates between two checkpoints, in this time."""
        return self if updates <= 0 else replace(self, updates_per_second=updates / max(seconds, _MOMENT_SECONDS))

    def updates_between(self, every: int) -> int:
        """Updates until the next checkpoint is begun, when at most `every` updates may be lost.

        It is at least half of them: when writing takes longer than that, training waits for it anyway, and would wait
        more often with more checkpoints.
        """
        early = math.ceil(self.written_seconds * self.updates_per_second)
        return max(every - early, (every + 1) // 2)

    def seconds_between(self, every: float) -> float:
        """Seconds until the next checkpoint is begun, when at most `every` seconds may be lost. More are lost when
        writing takes longer than half of that."""
        return max(every - self.written_seconds, every / 2)


_FADING = 0.8
_MOMENT_SECONDS = 1e-6
