"""Checkpoint saver: takes a checkpoint from its announcement to the commit.

A checkpoint is consistent without stopping the pipeline: every stage records its state right after it applied the same
microbatch. Stages apply microbatches in the same order, so together the parts are the model after exactly that many
updates. The parts are those of a replica, which the coordinator collects in the background, or the stages upload them.
The last checkpoint of a run is taken when nothing is in flight.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ravnest.coordinator.checkpoints.disk_space import DiskRoom
from ravnest.coordinator.checkpoints.part_check import BadPartError, StagePart
from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.schedule import CheckpointSchedule
from ravnest.coordinator.checkpoints.store import CheckpointStore, PendingCheckpoint
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.errors import DiskFullError, RunError
from ravnest.settings import Checkpoint


@dataclass(frozen=True, slots=True)
class Mark:
    """The number of a checkpoint, and where the run stands there."""

    checkpoint: int
    place: DataPosition
    ledger: Mapping[str, Any]


def place_of(info: CheckpointInfo) -> DataPosition:
    """The position from which a run resumes; RunError when the manifest does not have it."""
    completed = info.manifest["ledger"].get("completed")
    if type(completed) is not int or not 0 <= completed < 2**63:
        raise RunError(f"{info.folder} is damaged: its ledger does not say how many microbatches were completed.")
    return DataPosition(
        epoch=info.epoch,
        position=info.position,
        microbatches=completed,
        updates=info.updates,
        samples=info.samples,
        data_state=str(info.state.get("data_state", "")),
    )


class Awaited(NamedTuple):
    """The parts of a checkpoint that are missing although all stages have begun to save."""

    name: str
    """The name of the upload."""
    asked_at: float
    """Time by which the last stage had begun to save, on the clock `time.monotonic`."""
    nodes: tuple[str, ...]


class Saver:
    """The checkpoints of one deployment, at most one at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: Checkpoint,
        stages: Mapping[int, StagePart],
        state: Mapping[str, Any],
        updates: int = 0,
    ) -> None:
        """`stages` describe the parts, `state` goes into every manifest, and `updates` is the number of updates that
        the run begins with."""
        self._store = store
        self._stages = stages
        self._state = state
        self.on_full: Callable[[DiskFullError], None] = lambda error: None
        """Called when the disk had no room for the rest of a checkpoint, which has been aborted."""
        self.whole = False
        """Whether all parts of a checkpoint have arrived; it is on the disk, or about to be."""
        self._schedule = CheckpointSchedule(settings, updates)
        self._mark: Mark | None = None
        self._pending: PendingCheckpoint | None = None
        self._parts: set[int] = set()
        """The stages of the pending checkpoint whose parts have arrived."""
        self._recorded_at = 0.0
        """When the state of the pending checkpoint was recorded, in seconds since 1970."""
        self._is_committing = False

    def follow(self, before: "Saver") -> None:
        """Continues the schedule of another saver of the same run; its checkpoints are this run's as well."""
        self._schedule = before._schedule.restarted()

    def allow_every(self, seconds: float) -> None:
        """At most one checkpoint in this time is due by time, because the lines carry no more."""
        self._schedule.min_seconds = seconds

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    @property
    def pending(self) -> int | None:
        """The number of the pending checkpoint; None without one."""
        return None if self._mark is None else self._mark.checkpoint

    @property
    def is_committing(self) -> bool:
        """Whether all parts of the pending checkpoint have arrived and it is being written."""
        return self._is_committing

    @property
    def lacking(self) -> tuple[int, ...]:
        """The stages of the pending checkpoint whose parts have not arrived."""
        return tuple(stage for stage in self._stages if stage not in self._parts) if self.under_way else ()

    def due(self, updates: int) -> str | None:
        """The reason to announce a checkpoint now, or None."""
        return None if self.under_way else self._schedule.due(updates)

    def must_wait(self, updates: int) -> bool:
        """Whether a crash after this number of updates could cost more than an interval, unless the pending checkpoint
        is written first."""
        return self.under_way and self._schedule.is_at_risk(updates)

    def held(self, seconds: float) -> None:
        """Training has waited this long for `must_wait`."""
        self._schedule.held(seconds)

    def begin(self, mark: Mark, age_seconds: float = 0.0) -> None:
        """Announces a checkpoint, or begins to collect a state that was recorded `age_seconds` ago. RunError when the
        disk refuses, DiskFullError when it has no room.

        A checkpoint that the disk has no room for counts in the schedule: the next microbatch finds no room either.
        """
        self.abort()
        self._schedule.begun(mark.place.updates, age_seconds)
        self._recorded_at = time.time() - age_seconds
        self._pending = self._store.begin(mark.checkpoint, self.needed_bytes)
        self._mark = mark
        self._parts = set()

    @property
    def needed_bytes(self) -> int:
        """The size of a checkpoint: that of the newest one, and of the weights alone before the first."""
        return self._store.newest_bytes or sum(part.min_bytes for part in self._stages.values())

    def make_room(self) -> list[str]:
        """Aborts the pending checkpoint and removes older ones until a new one fits; the names of the removed ones."""
        self.abort()
        return self._store.make_room(self.needed_bytes)

    def room(self) -> DiskRoom:
        return self._store.room()

    async def part(
        self, checkpoint: int, stage: int, chunks: AsyncIterator[bytes], sha256: str = ""
    ) -> CheckpointInfo | None:
        """Receives a stage's part; returns the checkpoint when this was its last part.

        RunError when the disk refuses, BadPartError for a part that the stage may not save, or that has another hash
        than `sha256` if that is known. When the disk is full, the
        checkpoint is aborted and `on_full` is called. The rest of the part is then read and discarded, as are parts
        of an aborted checkpoint and parts that have arrived before: the stage has done its work.
        """
        expected = self._stages[stage]
        chunks = expected.bounded(chunks)
        pending, mark = self._pending, self._mark
        if pending is None or mark is None or mark.checkpoint != checkpoint or stage in self._parts:
            await _discard(chunks)
            return None
        try:
            await pending.write_part(stage, chunks, expected.check, sha256)
        except BadPartError:
            if self._pending is not pending:
                # The checkpoint was aborted meanwhile, and its files were removed under the check.
                return None
            raise
        except RunError as error:
            self._on_refused(pending, error)
            await _discard(chunks)
        if self._pending is not pending or stage in self._parts:
            return None
        self._parts.add(stage)
        return await self._commit(pending, mark) if len(self._parts) == len(self._stages) else None

    async def _commit(self, pending: PendingCheckpoint, mark: Mark) -> CheckpointInfo | None:
        place = mark.place
        # A run that resumes from the checkpoint feeds everything beyond it again.
        counts = {**mark.ledger, "fed": place.microbatches, "completed": place.microbatches, "lost": 0}
        before, self.whole = self.whole, True
        self._is_committing, recorded_at = True, self._recorded_at
        try:
            info = await asyncio.to_thread(
                pending.commit,
                updates=place.updates,
                samples=place.samples,
                epoch=place.epoch,
                position=place.position,
                ledger=counts,
                state={**self._state, "data_state": place.data_state},
                created_at=recorded_at,
            )
        except RunError as error:
            self.whole = before
            self._on_refused(pending, error)
            return None
        finally:
            self._is_committing = False
        self._schedule.saved(place.updates)
        if self._pending is pending:
            # Otherwise it was aborted too late and is on the disk: it counts, and another may be pending.
            self._schedule.written()
            self._pending = self._mark = None
        return info

    def abort(self) -> None:
        """Discards the pending checkpoint, if any."""
        if self._pending is not None:
            self._pending.abort()
        self._pending = self._mark = None

    def _on_refused(self, pending: PendingCheckpoint, error: RunError) -> None:
        """The disk refused a part of a checkpoint. An error of one that was aborted meanwhile does not matter."""
        if self._pending is not pending:
            return
        if not isinstance(error, DiskFullError):
            raise error
        self.abort()
        self.on_full(error)


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass
