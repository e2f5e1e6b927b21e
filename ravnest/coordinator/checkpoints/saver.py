"""When a checkpoint is due, and its life from the announcement to the commit.

A checkpoint is consistent without stopping the pipeline: it is announced with a microbatch, and every stage saves its
state right after applying that microbatch. Stages apply microbatches in the same order, so together the parts are the
model after exactly that many updates. The last one of a run is taken when nothing is in flight.

Whenever a crash comes, no more than one interval is lost: that a checkpoint takes a while to be written is reckoned
with when it is begun, and where it takes longer than expected, training waits for it rather than go on at risk.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ravnest.coordinator.checkpoints.disk_space import DiskRoom
from ravnest.coordinator.checkpoints.pace import Pace
from ravnest.coordinator.checkpoints.part_check import BadPartError, StagePart
from ravnest.coordinator.checkpoints.store import CheckpointInfo, CheckpointStore, PendingCheckpoint
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.errors import DiskFullError, RunError
from ravnest.settings import Checkpoint


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the run stands at a checkpoint."""

    checkpoint: int
    place: DataPosition
    ledger: Mapping[str, Any]


def place_of(info: CheckpointInfo) -> DataPosition:
    """Where a run that is resumed from this checkpoint goes on; RunError when the checkpoint does not say."""
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
    """Parts of a checkpoint that all stages have begun to save, and that are not there."""

    name: str
    """Of the upload."""
    asked_at: float
    """When the last stage had begun at the latest, on the clock `time.monotonic`."""
    nodes: tuple[str, ...]


class Saver:
    """The checkpoints of one run. At most one is under way."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: Checkpoint,
        stages: Mapping[int, StagePart],
        state: Mapping[str, Any],
        updates: int = 0,
    ) -> None:
        """`stages` say what each one's part holds; `state` goes into every checkpoint; `updates` is how many
        the run begins with."""
        self._store = store
        self._settings = settings
        self._stages = stages
        self._state = state
        self.on_full: Callable[[DiskFullError], None] = lambda error: None
        """Called when the disk had no room for the rest of one, which has been thrown away."""
        self.whole = False
        """Whether all parts of one have come; it is on the disk, or a moment away from it."""
        self._mark: Mark | None = None
        self._pending: PendingCheckpoint | None = None
        self._parts: set[int] = set()
        self._pace = Pace()
        self._last_time = time.monotonic()
        self._last_updates = updates
        self._saved_updates = updates
        """How many a run that is resumed now would begin with."""
        self._held_seconds = 0.0

    def follow(self, before: "Saver") -> None:
        """Takes the place of another, whose checkpoints are this run's as well: what it has saved counts on."""
        self._pace, self._last_time = before._pace, before._last_time
        self._last_updates = self._saved_updates = before._saved_updates

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    @property
    def lacking(self) -> tuple[int, ...]:
        """Of the one under way, the stages whose parts have not come."""
        return tuple(stage for stage in self._stages if stage not in self._parts) if self.under_way else ()

    def due(self, updates: int) -> str | None:
        """Why a checkpoint should be announced now, or None."""
        if self.under_way:
            return None
        seconds, most = self._settings.every_seconds, self._settings.every_updates
        if most is not None and updates - self._last_updates >= self._pace.updates_between(most):
            return f"{updates - self._last_updates} updates since the last one"
        if seconds is not None and time.monotonic() - self._last_time >= self._pace.seconds_between(seconds):
            return f"{time.monotonic() - self._last_time:.0f} s since the last one"
        return None

    def must_wait(self, updates: int) -> bool:
        """Whether a crash after so many updates could cost more than an interval, unless the one under way is written
        first. Of an interval in seconds nobody waits: those that train are not to stand still because a line is slow.
        """
        most = self._settings.every_updates
        return self.under_way and most is not None and updates - self._saved_updates > most

    def held(self, seconds: float) -> None:
        """Training has waited so long: that says nothing of how fast it is."""
        self._held_seconds += seconds

    def begin(self, mark: Mark) -> None:
        """Announces a checkpoint; RunError when the disk refuses, DiskFullError when it has no room.

        The next one is due as if there were this one: a disk that is full now will not have room with each microbatch.
        """
        self.abort()
        now = time.monotonic()
        seconds = now - self._last_time - self._held_seconds
        self._pace = self._pace.trained(mark.place.updates - self._last_updates, seconds)
        self._last_time, self._held_seconds = now, 0.0
        self._last_updates = mark.place.updates
        self._pending = self._store.begin(mark.checkpoint, self.needed_bytes)
        self._mark = mark
        self._parts = set()

    @property
    def needed_bytes(self) -> int:
        """What a checkpoint takes: as much as the newest one, or before there is one as much as the weights alone."""
        return self._store.newest_bytes or sum(part.min_bytes for part in self._stages.values())

    def make_room(self) -> list[str]:
        """Throws away what is under way and removes older checkpoints, as far as a new one needs their room; the names
        of those."""
        self.abort()
        return self._store.make_room(self.needed_bytes)

    def room(self) -> DiskRoom:
        return self._store.room()

    async def part(self, checkpoint: int, stage: int, chunks: AsyncIterator[bytes]) -> CheckpointInfo | None:
        """Takes a stage's part; the checkpoint, once this was the last part of it. RunError when the disk refuses,
        BadPartError for a part that is not what the stage may save. On a disk that is full the checkpoint is thrown
        away, `on_full` is called, and the rest of the part is taken for nothing: the stage has done what it should.

        One that comes again over another connection counts once."""
        expected = self._stages[stage]
        chunks = expected.bounded(chunks)
        pending, mark = self._pending, self._mark
        if pending is None or mark is None or mark.checkpoint != checkpoint:
            async for _ in chunks:
                pass
            return None
        if stage not in self._parts:
            try:
                await pending.write_part(stage, chunks, expected.check)
            except BadPartError:
                if self._pending is not pending:
                    # It was thrown away in the meantime, and with it what was to be checked.
                    return None
                raise
            except RunError as error:
                if self._pending is pending:
                    if not isinstance(error, DiskFullError):
                        raise
                    self._give_up(pending, error)
                # It is thrown away, perhaps while this was being written: the rest is taken for nothing.
                async for _ in chunks:
                    pass
        else:
            # A stage that did not hear that its part had arrived sends it once more.
            async for _ in chunks:
                pass
        if self._pending is not pending or stage in self._parts:
            return None
        self._parts.add(stage)
        if len(self._parts) < len(self._stages):
            return None
        place = mark.place
        # What was fed beyond the checkpoint is fed again by a run that goes on from it.
        counts = {**mark.ledger, "fed": place.microbatches, "completed": place.microbatches, "lost": 0}
        before, self.whole = self.whole, True
        try:
            info = await asyncio.to_thread(
                pending.commit,
                updates=place.updates,
                samples=place.samples,
                epoch=place.epoch,
                position=place.position,
                ledger=counts,
                state={**self._state, "data_state": place.data_state},
            )
        except RunError as error:
            self.whole = before
            if self._pending is pending:
                if not isinstance(error, DiskFullError):
                    raise
                self._give_up(pending, error)
            return None
        self._saved_updates = max(self._saved_updates, place.updates)
        if self._pending is pending:
            # Else it was to be thrown away and was on the disk already: it counts, and another may be under way.
            self._pace = self._pace.wrote(time.monotonic() - self._last_time)
            self._pending = self._mark = None
        return info

    def abort(self) -> None:
        """Throws away what is under way."""
        if self._pending is not None:
            self._pending.abort()
        self._pending = self._mark = None

    def _give_up(self, pending: PendingCheckpoint, error: DiskFullError) -> None:
        # One that was thrown away meanwhile has been told of, or was replaced by another.
        if self._pending is pending:
            self.abort()
            self.on_full(error)
