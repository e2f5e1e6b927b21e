"""Taking checkpoints while a run goes on: which cluster is saved, when, and what its stages upload.

One cluster's stages make a checkpoint. Where there are several clusters it is taken after a round, of the parameters
that all have since then; where there is one, its stages save right after a microbatch. One for which the disk has no
room is given up, and training goes on; only the last one of a run has to be.
"""

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from ravnest.coordinator.checkpoints.part_check import BadPartError, StagePart
from ravnest.coordinator.checkpoints.resume_optimizer import trained_with
from ravnest.coordinator.checkpoints.saver import Awaited, Mark, Saver
from ravnest.coordinator.checkpoints.store import CheckpointInfo, CheckpointStore
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import DiskFullError, RefusedError, RunError
from ravnest.graph.portable import PortableGraph
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Save
from ravnest.planner.plan import ClusterPlan
from ravnest.units import byte_size


def saver_of(store: CheckpointStore, prepared: PreparedJob, cluster: ClusterPlan, updates: int) -> Saver:
    """What saves the stages of this cluster, as a run of this job that has made so many updates."""
    return saver_for(store, prepared, {stage.stage: stage.graph for stage in cluster.stages}, updates)


def saver_for(
    store: CheckpointStore, prepared: PreparedJob, graphs: Mapping[int, PortableGraph], updates: int
) -> Saver:
    """The same of stages that have these graphs, by their numbers."""
    job, captured = prepared.job, prepared.captured
    state = {
        "aliases": dict(captured.aliases),
        "non_persistent": sorted(captured.not_saved),
        "stages": len(graphs),
        **trained_with(job),
    }
    parts = {stage: StagePart.of(stage, graph) for stage, graph in graphs.items()}
    store.trust(updates)
    return Saver(store, job.checkpoint, parts, state, updates)


class Checkpointer:
    """The checkpoints of a run."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        make_saver: Callable[[ClusterPlan], Saver],
        cluster: ClusterRun,
        deployment: str,
        ledger: Ledger,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Of this cluster, to begin with; `make_saver` makes what writes the checkpoints of one, `say` tells the user
        something."""
        self.last: CheckpointInfo | None = None
        """The newest that this run has taken."""
        self.expected = False
        """Whether one is to be taken after the round under way."""
        self._course = course
        self._swarm = swarm
        self._make_saver = make_saver
        self._deployment = deployment
        self._ledger = ledger
        self._saved: dict[str, int] = {}
        self._say = say
        self._last_number = 0
        self._asked_at: float | None = None
        """When all stages had begun to save what is under way; None before that."""
        self._given_up: dict[int, DiskFullError] = {}
        """The newest one that the disk had no room for, by its number."""
        self._room_made = False
        """Whether there is more room since that was given up."""
        self._cluster = cluster
        self._saver = self._saver_of(cluster)

    @property
    def has_saved(self) -> bool:
        """Whether there is one of this run to go on from."""
        return self.last is not None or self._saver.whole

    @property
    def awaited(self) -> Awaited | None:
        """The parts that should be coming; None where there are none."""
        lacking, asked_at = self._saver.lacking, self._asked_at
        if not lacking or asked_at is None:
            return None
        nodes = tuple(stage.node for stage in self._cluster.plan.stages if stage.stage in lacking)
        return Awaited(f"checkpoint-{self._last_number}", asked_at, nodes)

    def applied(self, cluster: ClusterRun, microbatch: int) -> None:
        """All stages of a cluster have applied this one, and have begun to save what was to be saved with it."""
        if self._asked_at is None and cluster is self._cluster and microbatch + 1 == self._last_number:
            self._asked_at = time.monotonic()

    @property
    def under_way(self) -> bool:
        return self._saver.under_way or self.expected

    def due(self, place: DataPosition) -> str | None:
        """Why one should be taken now, or None."""
        return None if self.expected else self._saver.due(place.updates)

    async def room_for(self, place: DataPosition) -> None:
        """Returns when the run may go on to this place: at once, unless a checkpoint takes so long to be written that a
        crash there would cost more than one interval."""
        saver = self._saver
        if saver.must_wait(place.updates):
            since = time.monotonic()
            await self._course.until(lambda: not self._saver.must_wait(place.updates))
            saver.held(time.monotonic() - since)

    def with_microbatch(self, item: TrainBatch) -> int:
        """The number of the checkpoint to be taken with this microbatch, or 0; RunError when the disk refuses."""
        why = self.due(item.after) if item.completes_update else None
        number = item.microbatch + 1
        if why is None or not self._begin(number, item.after):
            return 0
        self._course.emit("checkpoint_begun", why, microbatch=item.microbatch)
        return number

    async def after_round(self, place: DataPosition, why: str) -> None:
        """Saves what all clusters have since the last round, which stands at this place in the data."""
        number = place.microbatches
        if not self._begin(number, place):
            return
        self._course.emit("checkpoint_begun", why, microbatch=number)
        await self._order(number, anchored=True)

    async def now(self) -> CheckpointInfo:
        """Nothing is in flight: saves where the run stands. DiskFullError when there is no room for that."""
        await self._course.until(
            lambda: not self.under_way and not self._cluster.is_forming and not self._cluster.again
        )
        saver = self._saver
        # A second try has another number: what was said of the first is not said of it.
        number = max(self._ledger.completed, self._last_number) + 1
        if not self._begin(number, self._ledger.applied):
            raise self._given_up[number]
        await self._order(number, anchored=False)
        # A stage reports before it says that it has saved: after this, the summary has its last counts.
        await self._course.until(lambda: self._saver is not saver or self._all_saved(number))
        if self._saver is not saver:
            # The cluster that was being saved is lost, and another has what it had.
            return await self.now()
        if number in self._given_up:
            if self._room_made:
                return await self.now()
            raise self._given_up[number]
        assert self.last is not None
        return self.last

    def formed(self, cluster: ClusterRun, deployment: str, make_saver: Callable[[ClusterPlan], Saver]) -> None:
        """Another formation has taken the place of the one before, and this cluster of it is saved."""
        self._deployment, self._make_saver, self.expected = deployment, make_saver, False
        self.move_to(cluster)

    def move_to(self, cluster: ClusterRun) -> None:
        """From now on this cluster is saved: the one before is lost, and what it had begun to upload."""
        before = self._saver
        before.abort()
        self._cluster, self._saver = cluster, self._saver_of(cluster)
        self._saver.follow(before)
        self._course.notify()

    @property
    def nodes(self) -> list[str]:
        """Who holds the stages that are saved."""
        return self._cluster.nodes

    def is_of(self, cluster: ClusterRun) -> bool:
        return self._cluster is cluster

    def saved(self, node_id: str, number: int) -> None:
        """A stage says that its part of this one has been uploaded."""
        self._saved[node_id] = number
        self._course.notify()

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Takes a stage's part. RefusedError for one that is not the provider's to upload."""
        number, stage = name.removeprefix("checkpoint-"), self._stage_of(node_id)
        if stage is None or not re.fullmatch("[0-9]{1,19}", number):
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        try:
            info = await self._saver.part(int(number), stage, chunks)
        except BadPartError as error:
            refused = RefusedError(f"{node_id} uploaded a bad checkpoint: {error}")
            self._course.emit("upload_refused", str(refused), provider=node_id)
            # The checkpoint will never be whole, and whoever waits for it is to know why.
            self._swarm.dismiss(node_id, refused)
            raise refused from None
        except RunError as error:
            self._course.fail(error)
            raise
        if info is not None:
            self.last = info
            what = f"{info.folder.name} is complete"
            self._course.emit("checkpoint", what, updates=info.updates, samples=info.samples)
            self._course.notify()

    def abort(self) -> None:
        self._saver.abort()

    def _stage_of(self, node_id: str) -> int | None:
        return next((stage.stage for stage in self._cluster.plan.stages if stage.node == node_id), None)

    def make_room(self, error: DiskFullError) -> bool:
        """Something else could not be written: gives up the checkpoint under way and the older ones, as far as that
        helps; whether it does. The newest good one stays."""
        under_way = self._saver.under_way
        removed = self._saver.make_room()
        if under_way or removed:
            self._tell_full(str(error), removed)
        return under_way or bool(removed)

    def _saver_of(self, cluster: ClusterRun) -> Saver:
        saver = self._make_saver(cluster.plan)
        saver.on_full = self._full
        return saver

    def _begin(self, number: int, place: DataPosition) -> bool:
        """Begins one, and says whether there is room for it."""
        self._last_number, self._asked_at = number, None
        try:
            self._saver.begin(Mark(number, place, self._ledger.counts()))
        except DiskFullError as error:
            self._full(error)
            return False
        return True

    def _full(self, error: DiskFullError) -> None:
        """The checkpoint under way is given up."""
        removed = self._saver.make_room()
        self._room_made = bool(removed)
        room, needed = self._saver.room(), self._saver.needed_bytes
        kept = f"{self.last.folder.name} stays" if self.last is not None else "nothing that was saved before is touched"
        reason = f"a checkpoint is given up, and training goes on: the disk is full, {room.lacking(needed)}; {kept}"
        self._tell_full(reason, removed)
        self._given_up = {
            self._last_number: DiskFullError(
                f"the run cannot be saved: {error}; free {byte_size(max(1 << 20, room.missing_bytes(needed)))} "
                f"where the run is kept and continue with --resume ({kept})"
            )
        }
        self._course.notify()

    def _tell_full(self, reason: str, removed: Sequence[str]) -> None:
        room = self._saver.room()
        missing = room.missing_bytes(self._saver.needed_bytes)
        if removed:
            reason += f"; removed to make room: {', '.join(removed)}"
        self._course.emit("disk_full", reason, missing_bytes=missing, free_bytes=room.free_bytes, removed=[*removed])
        self._say(reason)

    async def _order(self, number: int, anchored: bool) -> None:
        self._asked_at = time.monotonic()
        for node_id in self._cluster.nodes:
            order = Save(deployment=self._deployment, checkpoint=number, anchored=anchored)
            await self._course.tell(node_id, CoordinatorMessage(save=order))

    def _all_saved(self, number: int) -> bool:
        return all(self._saved.get(node) == number for node in self._cluster.nodes)
