"""Checkpoint schedule: when the next checkpoint is due, and when training has to wait for the one under way.

A crash costs at most one interval. The schedule therefore begins a checkpoint early, by the time that writing it takes
(see `pace`). When writing takes longer than expected, training waits.
"""

import copy
import time
from collections.abc import Callable
from typing import Self

from ravnest.coordinator.checkpoints.pace import CheckpointPace
from ravnest.settings import Checkpoint


class CheckpointSchedule:
    """When checkpoints were begun and saved, and when the next is due by the job's settings."""

    def __init__(self, settings: Checkpoint, updates: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`updates` is the number of updates that the run begins with."""
        self._settings = settings
        self._clock = clock
        self._pace = CheckpointPace()
        self._begun_at = clock()
        self._begun_updates = updates
        """Number of updates in the checkpoint that was begun last."""
        self._saved_updates = updates
        """Number of updates in the newest checkpoint on the disk."""
        self._held_seconds = 0.0
        self.min_seconds = 0.0
        """Minimum time between two checkpoints, which follows from the lines."""

    def due(self, updates: int) -> str | None:
        """The reason to begin a checkpoint now, or None."""
        seconds, every = self._settings.every_seconds, self._settings.every_updates
        if every is not None and updates - self._begun_updates >= self._pace.updates_between(every):
            return f"{updates - self._begun_updates} updates since the last one"
        if seconds is None:
            return None
        if self._clock() - self._begun_at >= max(self._pace.seconds_between(seconds), self.min_seconds):
            return f"{self._clock() - self._begun_at:.0f} s since the last one"
        return None

    def is_at_risk(self, updates: int) -> bool:
        """Whether a crash after this number of updates would cost more than an interval.

        An interval in seconds never makes training wait: a slow line must not stop it.
        """
        every = self._settings.every_updates
        return every is not None and updates - self._saved_updates > every

    def held(self, seconds: float) -> None:
        """Training has waited for this long, which does not count when its rate is measured."""
        self._held_seconds += seconds

    def begun(self, updates: int, age_seconds: float = 0.0) -> None:
        """A checkpoint with this number of updates begins. Its state was recorded this long ago."""
        now = max(self._begun_at, self._clock() - age_seconds)
        seconds = now - self._begun_at - self._held_seconds
        self._pace = self._pace.trained(updates - self._begun_updates, seconds)
        self._begun_at, self._held_seconds, self._begun_updates = now, 0.0, updates

    def saved(self, updates: int) -> None:
        """A checkpoint with this number of updates is on the disk."""
        self._saved_updates = max(self._saved_updates, updates)

    def written(self) -> None:
        """The checkpoint that was begun last is on the disk: its time tells how early to begin the next."""
        self._pace = self._pace.wrote(self._clock() - self._begun_at)

    def restarted(self) -> Self:
        """A copy that continues from the newest checkpoint on the disk, without the one under way."""
        other = copy.copy(self)
        other._begun_updates, other._held_seconds = self._saved_updates, 0.0
        return other
