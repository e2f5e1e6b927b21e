"""Checkpointer: takes checkpoints while a run goes on.

- A cluster of several providers makes replicas, and a checkpoint is one of them, which the coordinator collects in the
  background (`collecting`). The stages do nothing for it.
- A single provider has no replicas: its stage uploads its state as it is right after a microbatch.
- With several clusters, the stages of one upload the parameters that all clusters have since a round of averaging.
- The last checkpoint of a run is uploaded with nothing in flight. So is one that training waits for when no replica can
  be had.

If the disk has no room, the checkpoint is given up and training goes on; only the last checkpoint of a run is required.
"""

import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from ravnest.coordinator.checkpoints.part_check import BadPartError, StagePart
from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.checkpoints.resume_optimizer import trained_with
from ravnest.coordinator.checkpoints.saver import Awaited, Mark, Saver
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.run.collecting import Collector, ReplicaChoice
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.swarm.own_line import receiver_limit
from ravnest.errors import DiskFullError, RefusedError, RunError
from ravnest.graph.portable import PortableGraph
from ravnest.monitor.summary import SavedState
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Save
from ravnest.planner.plan import ClusterPlan, StagePlan
from ravnest.units import byte_size


def saver_of(store: CheckpointStore, prepared: PreparedJob, cluster: ClusterPlan, updates: int) -> Saver:
    """The saver for the stages of this cluster, in a run that begins with this number of updates."""
    return saver_for(store, prepared, {stage.stage: stage.graph for stage in cluster.stages}, updates)


def saver_for(
    store: CheckpointStore, prepared: PreparedJob, graphs: Mapping[int, PortableGraph], updates: int
) -> Saver:
    """The saver for stages with these graphs, by stage number."""
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
    """The checkpoints of a run, for all its deployments."""

    def __init__(self, context: RunContext, store: CheckpointStore, prepared: PreparedJob) -> None:
        self.last: CheckpointInfo | None = None
        """The newest checkpoint that this run has taken."""
        self.is_expected = False
        """Whether a checkpoint is to be taken after the current round of averaging."""
        self.wanted = ""
        """Why a checkpoint is due at once; empty if the schedule says when."""
        self._context = context
        self._store = store
        self._prepared = prepared
        self._resumed = context.ledger.updates > 0
        self._deployment = ""
        self._cluster: ClusterRun | None = None
        """The cluster whose stages are saved; None before the first deployment."""
        self._saver = saver_for(store, prepared, {}, context.ledger.updates)
        self._collector: Collector | None = None
        self._collecting: ReplicaChoice | None = None
        """The replica that is collected as the pending checkpoint."""
        self._begin_updates = context.ledger.updates
        """The number of updates in the checkpoint that the run was resumed from."""
        self._is_held = False
        """Whether training waits for the pending checkpoint."""
        self._saved: dict[str, int] = {}
        """By provider, the number of the checkpoint that it reported last as uploaded."""
        self._last_number = 0
        self._asked_at: float | None = None
        """When all stages had begun to save the pending checkpoint; None before that."""
        self._given_up: dict[int, DiskFullError] = {}
        """The newest checkpoint that the disk had no room for, by its number: the error of a run that needs it."""
        self._room_made = False
        """Whether older checkpoints were removed after that one was given up."""
        self._min_seconds = 0.0
        context.make_room = self.make_room
        self._show(store.newest)

    @property
    def has_saved(self) -> bool:
        """Whether this run has a checkpoint of its own."""
        return self.last is not None or self._saver.whole

    @property
    def advice(self) -> str:
        """Advice for the user of a run that has failed."""
        if not self.has_saved and not self._resumed:
            return "nothing had been saved yet"
        return "the last good checkpoint is kept, continue from it with --resume"

    @property
    def awaited(self) -> Awaited | None:
        """The parts that should be arriving; None if there are none."""
        lacking, asked_at = self._saver.lacking, self._asked_at
        if not lacking or asked_at is None:
            return None
        nodes = tuple(stage.node for stage in self._stages if stage.stage in lacking)
        return Awaited(f"checkpoint-{self._last_number}", asked_at, nodes)

    @property
    def upload_name(self) -> str:
        """Name under which the stages upload the pending checkpoint; empty if they do not."""
        is_uploaded = self._saver.pending == self._last_number and not self._is_collecting
        return f"checkpoint-{self._last_number}" if is_uploaded else ""

    @property
    def under_way(self) -> bool:
        return self._saver.under_way or self.is_expected

    @property
    def nodes(self) -> list[str]:
        """The providers whose stages are saved."""
        return [stage.node for stage in self._stages]

    def is_of(self, cluster: ClusterRun) -> bool:
        """Whether this is the cluster that is saved."""
        return self._cluster is cluster

    def deployed(self, deployment: str, cluster: ClusterRun, collector: Collector | None = None) -> None:
        """A new deployment has replaced the one before; this cluster of it is saved from now on. The `collector`
        collects its replicas."""
        self._deployment, self.is_expected, self._collector = deployment, False, collector
        self.move_to(cluster)

    def reset(self) -> None:
        """The deployment has been undone. The next one begins its schedule of checkpoints like the first."""
        self._saver.abort()
        self._cluster = None

    def move_to(self, cluster: ClusterRun) -> None:
        """Saves another cluster from now on, or the same one with other providers, and gives up the pending checkpoint.
        A replica of the same cluster that is being collected stays valid."""
        if cluster is self._cluster and self._is_collecting:
            return
        before, is_first = self._saver, self._cluster is None
        before.abort()
        self._cluster = cluster
        self._saver = saver_of(self._store, self._prepared, cluster.plan, self._begin_updates)
        self._saver.on_full = self._on_full
        if not is_first:
            self._saver.follow(before)
        self._saver.allow_every(self._min_seconds)
        self._context.notify()

    def allow_every(self, seconds: float) -> None:
        """At most one checkpoint in this time is due by time, because the lines carry no more."""
        self._min_seconds = seconds
        self._saver.allow_every(seconds)

    def applied(self, cluster: ClusterRun, microbatch: int) -> None:
        """All stages of a cluster have applied this microbatch, and have begun to save what belongs to it."""
        is_last = cluster is self._cluster and microbatch + 1 == self._last_number
        if self._asked_at is None and is_last and not self._is_collecting:
            self._asked_at = time.monotonic()

    def due(self, place: DataPosition) -> str | None:
        """Why a checkpoint is due, or None."""
        if self.wanted and not self.under_way:
            return self.wanted
        return None if self.is_expected else self._saver.due(place.updates)

    async def room_for(self, place: DataPosition) -> None:
        """Returns when the run may continue to this position: at once, unless the pending checkpoint takes so long that
        a crash there would cost more than one interval."""
        saver = self._saver
        if saver.must_wait(place.updates):
            since = time.monotonic()
            self._is_held = True
            self._context.notify()
            try:
                await self._context.until(lambda: not self._saver.must_wait(place.updates))
            finally:
                self._is_held = False
            saver.held(time.monotonic() - since)

    def with_microbatch(self, item: TrainBatch) -> int:
        """The number of the checkpoint that the stages upload with this microbatch, or 0; RunError when the disk
        refuses. A checkpoint of a cluster with replicas is collected instead."""
        why = self.due(item.after) if item.completes_update else None
        number = item.microbatch + 1
        if why is None:
            return 0
        if self._collect_with(number, item.after, why) or not self._begin(number, item.after):
            return 0
        self._context.emit("checkpoint_begun", why, microbatch=item.microbatch)
        return number

    async def after_round(self, place: DataPosition, why: str) -> None:
        """Saves the parameters that all clusters have since the last round, which was at this position."""
        number = place.microbatches
        if not self._begin(number, place):
            return
        self._context.emit("checkpoint_begun", why, microbatch=number)
        await self._order(number, anchored=True)

    async def now(self) -> CheckpointInfo:
        """Saves the current state with nothing in flight. DiskFullError when there is no room for it."""
        # One that is being collected is given up, because it would be out of date.
        await self._context.until(
            lambda: (
                (not self.under_way or (self._is_collecting and not self._saver.is_committing)) and not self._is_rebuilt
            )
        )
        saver = self._saver
        # A second attempt has another number, so that late messages about the first do not count for it.
        number = max(self._context.ledger.completed, self._last_number) + 1
        if not self._begin(number, self._context.ledger.applied):
            raise self._given_up[number]
        await self._order(number, anchored=False)
        # A stage reports before it says that it has saved, so the summary has its last counts after this.
        await self._context.until(lambda: self._saver is not saver or self._all_saved(number))
        if self._saver is not saver:
            # The cluster that was being saved is lost; another one is saved.
            return await self.now()
        if number in self._given_up:
            if self._room_made:
                return await self.now()
            raise self._given_up[number]
        assert self.last is not None
        return self.last

    def saved(self, node_id: str, number: int) -> None:
        """A stage reports that its part of this checkpoint has been uploaded."""
        self._saved[node_id] = number
        self._context.notify()

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Receives a stage's part. RefusedError for a part that is not the provider's to upload."""
        number = name.removeprefix("checkpoint-")
        stage = next((stage.stage for stage in self._stages if stage.node == node_id), None)
        if stage is None or not re.fullmatch("[0-9]{1,19}", number):
            raise RefusedError(f"{node_id} may not upload {name[:80]!r}")
        try:
            info = await self._saver.part(int(number), stage, chunks)
        except BadPartError as error:
            refused = RefusedError(f"{node_id} uploaded a bad checkpoint: {error}")
            self._context.emit("upload_refused", str(refused), provider=node_id)
            # The checkpoint will never be whole, and those that wait for it must learn why.
            self._context.swarm.dismiss(node_id, refused)
            raise refused from None
        except RunError as error:
            self._context.fail(error)
            raise
        if info is not None:
            self._on_complete(info)

    def abort(self) -> None:
        """Gives up the pending checkpoint."""
        self._saver.abort()
        self._context.notify()

    def make_room(self, error: DiskFullError) -> bool:
        """Makes room for a line that the full disk refused: gives up the pending checkpoint and removes older ones.
        Whether that made room. The newest good checkpoint stays."""
        under_way = self._saver.under_way
        removed = self._saver.make_room()
        if under_way or removed:
            self._tell_full(str(error), removed)
        return under_way or bool(removed)

    @property
    def _stages(self) -> tuple[StagePlan, ...]:
        return () if self._cluster is None else self._cluster.plan.stages

    @property
    def _is_rebuilt(self) -> bool:
        """Whether the cluster that is saved lacks a stage, or replays microbatches for a new one."""
        return self._cluster is not None and bool(self._cluster.is_forming or self._cluster.again)

    @property
    def _is_collecting(self) -> bool:
        """Whether the pending checkpoint is collected from a replica."""
        return self._collecting is not None and self._saver.pending == self._collecting.number

    @property
    def _collected_updates(self) -> int:
        return self._begin_updates if self.last is None else self.last.updates

    def _collect_with(self, number: int, place: DataPosition, why: str) -> bool:
        """Collects a replica as the checkpoint that is due with this microbatch. False if the cluster has none."""
        collector, cluster, saver = self._collector, self._cluster, self._saver
        chosen = None
        if collector is not None and cluster is not None:
            chosen = collector.choose(cluster, number, place, self._collected_updates)
        if collector is None or cluster is None or chosen is None:
            return False
        choice, reason = chosen
        if self._begin(choice.number, choice.place, choice):
            if choice.is_new:
                collector.require(cluster)
            self._context.emit("checkpoint_begun", f"{why}; {reason}", microbatch=choice.number - 1)
            self._context.spawn(self._collect(collector, cluster, saver, choice))
        return True

    async def _collect(self, collector: Collector, cluster: ClusterRun, saver: Saver, choice: ReplicaChoice) -> None:
        """Collects replicas until one is saved, or the checkpoint is given up."""
        failed: set[int] = set()

        def is_over() -> bool:
            return self._collecting is not choice or saver.pending != choice.number

        def is_stuck() -> bool:
            # Training waits for this checkpoint, so no microbatch comes that could announce another replica.
            return self._is_held and self._context.ledger.outstanding == 0 and not self._is_rebuilt

        while not is_over():
            wanted, newest = choice.place.updates, self._collected_updates
            found = await collector.next_replica(cluster, wanted, newest, failed, is_over, is_stuck)
            if is_over():
                return
            if found is None:
                await self._save_now_instead()
                return
            if found.number != choice.number:
                choice = found
                if not self._begin(choice.number, choice.place, choice):
                    return
            info = await collector.collect(cluster, saver, choice.number, lambda: self._is_held)
            if info is not None:
                self._on_complete(info)
                return
            failed.add(choice.number)

    async def _save_now_instead(self) -> None:
        """Lets the stages upload their state, with nothing in flight: there is no replica, and training waits."""
        place = self._context.ledger.applied
        number = max(self._context.ledger.completed, self._last_number) + 1
        if self._begin(number, place):
            reason = "no replica could be made, so the stages upload their state"
            self._context.emit("checkpoint_begun", reason, microbatch=number - 1)
            await self._order(number, anchored=False)

    def _show(self, info: CheckpointInfo | None) -> None:
        if info is not None:
            checkpoint, progress = SavedState(updates=info.updates, at=info.recorded_at or 0.0), self._context.progress
            progress.state = replace(progress.state, checkpoint=checkpoint)

    def _on_complete(self, info: CheckpointInfo) -> None:
        self.last = info
        self._show(info)
        what = f"checkpoint {info.folder.name} is complete"
        self._context.emit("checkpoint", what, updates=info.updates, samples=info.samples)
        self._context.notify()

    def _begin(self, number: int, place: DataPosition, replica: ReplicaChoice | None = None) -> bool:
        """Begins a checkpoint that the stages upload, or that is collected from this replica; whether there is room."""
        self._last_number, self._asked_at, self._collecting, self.wanted = number, None, replica, ""
        age_seconds = 0.0 if replica is None else replica.age_seconds
        try:
            self._saver.begin(Mark(number, place, self._context.ledger.counts()), age_seconds)
        except DiskFullError as error:
            self._on_full(error)
            return False
        return True

    def _on_full(self, error: DiskFullError) -> None:
        """Gives up the pending checkpoint."""
        removed = self._saver.make_room()
        self._room_made = bool(removed)
        room, needed = self._saver.room(), self._saver.needed_bytes
        kept = f"checkpoint {self.last.folder.name} stays" if self.last is not None else "any earlier checkpoint stays"
        reason = f"a checkpoint is given up, and training goes on: the disk is full, {room.lacking(needed)}; {kept}"
        self._tell_full(reason, removed)
        self._given_up = {
            self._last_number: DiskFullError(
                f"the run cannot be saved: {error}; free {byte_size(max(1 << 20, room.missing_bytes(needed)))} "
                f"where the run is kept and continue with --resume ({kept})"
            )
        }
        self._context.notify()

    def _tell_full(self, reason: str, removed: Sequence[str]) -> None:
        room = self._saver.room()
        missing = room.missing_bytes(self._saver.needed_bytes)
        if removed:
            reason += f"; removed to make room: {', '.join(removed)}"
        self._context.emit("disk_full", reason, missing_bytes=missing, free_bytes=room.free_bytes, removed=[*removed])
        self._context.say(reason)

    async def _order(self, number: int, anchored: bool) -> None:
        self._asked_at = time.monotonic()
        for node_id in self.nodes:
            # Without rounds to go on with, nothing is in flight: the run waits for the checkpoint.
            order = Save(
                deployment=self._deployment,
                checkpoint=number,
                anchored=anchored,
                urgent=not anchored,
                max_bytes_per_second=receiver_limit(self._context.swarm.line.down_bytes_per_second, len(self.nodes)),
            )
            await self._context.tell(node_id, CoordinatorMessage(save=order))

    def _all_saved(self, number: int) -> bool:
        return all(self._saved.get(node) == number for node in self.nodes)
