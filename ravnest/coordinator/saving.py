"""When a checkpoint is due, and its life from the announcement to the commit.

A checkpoint is consistent without stopping the pipeline: it is announced with a microbatch, and every stage saves its
state right after applying that microbatch. Stages apply microbatches in the same order, so together the parts are the
model after exactly that many updates. The last one of a run is taken when nothing is in flight.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest.coordinator.checkpoints import CheckpointInfo, CheckpointStore, PendingCheckpoint
from ravnest.coordinator.ledger import Place
from ravnest.coordinator.prepare import Prepared
from ravnest.coordinator.resuming import trained_with
from ravnest.coordinator.run_plan import ClusterPlan
from ravnest.coordinator.stage_parts import BadPartError, StagePart
from ravnest.errors import RunError
from ravnest.settings import Checkpoint


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the run stands at a checkpoint."""

    checkpoint: int
    place: Place
    ledger: Mapping[str, Any]


def place_of(info: CheckpointInfo) -> Place:
    """Where a run that is resumed from this checkpoint goes on; RunError when the checkpoint does not say."""
    completed = info.manifest["ledger"].get("completed")
    if type(completed) is not int or not 0 <= completed < 2**63:
        raise RunError(f"{info.folder} is damaged: its ledger does not say how many microbatches were completed.")
    return Place(
        epoch=info.epoch,
        position=info.position,
        microbatches=completed,
        updates=info.updates,
        samples=info.samples,
        data_state=str(info.state.get("data_state", "")),
    )


def saver_of(store: CheckpointStore, prepared: Prepared, cluster: ClusterPlan, updates: int) -> "Saver":
    """What saves the stages of this cluster, as a run of this job that has made so many updates."""
    job, captured = prepared.job, prepared.captured
    state = {
        "aliases": dict(captured.aliases),
        "non_persistent": sorted(captured.not_saved),
        "stages": len(cluster.stages),
        **trained_with(job),
    }
    parts = [StagePart.of(stage.stage, stage.graph) for stage in cluster.stages]
    return Saver(store, job.checkpoint, parts, state, updates)


class Saver:
    """The checkpoints of one run. At most one is under way."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: Checkpoint,
        stages: Sequence[StagePart],
        state: Mapping[str, Any],
        updates: int = 0,
    ) -> None:
        """`stages` say what each one's part holds, in order; `state` goes into every checkpoint; `updates` is how many
        the run begins with."""
        self._store = store
        self._settings = settings
        self._stages = stages
        self._state = state
        self.whole = False
        """Whether all parts of one have come; it is on the disk, or a moment away from it."""
        self._mark: Mark | None = None
        self._pending: PendingCheckpoint | None = None
        self._parts: set[int] = set()
        self._last_time = time.monotonic()
        self._last_updates = updates

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    def due(self, updates: int) -> str | None:
        """Why a checkpoint should be announced now, or None."""
        if self.under_way:
            return None
        seconds, most = self._settings.every_seconds, self._settings.every_updates
        if most is not None and updates - self._last_updates >= most:
            return f"{updates - self._last_updates} updates since the last one"
        if seconds is not None and time.monotonic() - self._last_time >= seconds:
            return f"{time.monotonic() - self._last_time:.0f} s since the last one"
        return None

    def begin(self, mark: Mark) -> None:
        """Announces a checkpoint; RunError when the disk refuses."""
        self.abort()
        self._pending = self._store.begin(mark.checkpoint)
        self._mark = mark
        self._parts = set()
        self._last_time = time.monotonic()
        self._last_updates = mark.place.updates

    async def part(self, checkpoint: int, stage: int, chunks: AsyncIterator[bytes]) -> CheckpointInfo | None:
        """Takes a stage's part; the checkpoint, once this was the last part of it. RunError when the disk refuses,
        BadPartError for a part that is not what the stage may save.

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
        self.whole = True
        info = await asyncio.to_thread(
            pending.commit,
            updates=place.updates,
            samples=place.samples,
            epoch=place.epoch,
            position=place.position,
            ledger=counts,
            state={**self._state, "data_state": place.data_state},
        )
        self._pending = self._mark = None
        return info

    def abort(self) -> None:
        """Throws away what is under way."""
        if self._pending is not None:
            self._pending.abort()
        self._pending = self._mark = None
