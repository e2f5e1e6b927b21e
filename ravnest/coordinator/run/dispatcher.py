"""Feeding the clusters: each microbatch goes to the one with most room, and again where stages or clusters are lost."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters, FedMicrobatch, RoundMark
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, Ledger, LedgerEntry
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import ValueSpec
from ravnest.graph.sizes import sizes_of
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind

BETTER_REASON_SECONDS: Final = 1.0
"""How long the reason is waited for why a provider cannot be reached: who it was told by says more."""


class Dispatcher:
    """What is fed, and what has come of it."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        clusters: Clusters,
        ledger: Ledger,
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        self.replica: Callable[[ClusterRun, TrainBatch], int] = lambda cluster, item: 0
        """Says the number of the replica that a cluster is to keep with a microbatch, or 0."""
        self.clusters = clusters
        self.fed_samples = 0
        self.fed_place: DataPosition = ledger.applied
        """Where the run stands once all that was fed has been applied."""
        self.replaying = 0
        """How many clusters were lost whose microbatches have not all been fed again."""
        self.claims: dict[int, tuple[ClusterRun, bool]] = {}
        """What clusters that were taken over have applied already of what is to be fed: by microbatch, which cluster,
        and whether all of its stages have. Until all of it has come, they know more than any place in the data says."""
        self.paused = ""
        """Why no other update is begun for now."""
        self.inputs: Sequence[ValueSpec] = ()
        """Of the whole model: what their free sizes are in each microbatch, every stage is told."""
        self._walks = 0
        """How often the data has been walked from an earlier place again."""
        self._course = course
        self._swarm = swarm
        self._ledger = ledger
        self._recorder = recorder
        self._progress = progress

    async def batch(self, item: TrainBatch, checkpoint: Callable[[], int]) -> None:
        """Feeds a microbatch, once there is room for it; then `checkpoint` says the number of the one that is to be
        taken with it, or 0."""
        claim = self.claims.get(item.microbatch)
        if claim is not None and await self._again_after_takeover(item, *claim):
            return
        cluster = await self._room()
        self._begin(item)
        await self._feed(cluster, item, item.completes_update, checkpoint())

    async def _again_after_takeover(self, item: TrainBatch, cluster: ClusterRun, whole: bool) -> bool:
        """Counts a microbatch that a cluster has applied, or feeds it again for those of its stages that have not.
        False where the cluster is lost: it is as if it had never come there."""
        if not whole:
            await self._course.until(lambda: cluster.is_lost or cluster.room > 0)
        self.claims.pop(item.microbatch, None)
        if cluster.is_lost:
            return False
        self._begin(item)
        self.clusters.group = None if item.completes_update else cluster
        cluster.fed_samples += item.samples
        if whole:
            self._count(cluster, item.microbatch)
            return True
        self._ledger.replayed += 1
        cluster.open[item.microbatch] = item
        cluster.retained[item.microbatch] = FedMicrobatch(item, item.completes_update)
        await self._train_on(cluster, item, item.completes_update)
        return True

    def _begin(self, item: TrainBatch) -> None:
        entry = LedgerEntry(item.microbatch, item.samples, item.after, item.completes_update)
        self._progress.epochs.current = item.after.epoch
        self._ledger.feed(entry)
        self._recorder.fed(item.microbatch, item.after)
        self.fed_samples += item.samples
        self.fed_place = item.after

    async def evaluation(self, item: EvalBatch) -> None:
        """Feeds a batch to be evaluated, once there is room for it."""
        await self._evaluate(item, self._walks)

    def go_back(self, place: DataPosition) -> None:
        """The data is walked from this place again: what others had left undone comes with it."""
        self._walks += 1
        self.fed_place = place
        self._course.notify()

    async def _evaluate(self, item: EvalBatch, walk: int) -> None:
        while (cluster := self.clusters.for_evaluation()) is None and walk == self._walks:
            await self._course.until(lambda: self.clusters.for_evaluation() is not None or walk != self._walks)
        if cluster is None or walk != self._walks:
            return
        cluster.evaluating[item.microbatch] = item
        await self._send(cluster, item.tensors, item.microbatch, Marks(train=False, samples=item.samples))

    def completed(self, node_id: str, microbatch: int) -> bool:
        """A root says that a microbatch has been applied by every stage of its cluster; whether it is the first time.
        RefusedError when it was not under way there."""
        cluster = self.clusters.of(node_id)
        if cluster is None:
            # It was given up in the meantime, and others do what it had left.
            return False
        cluster.sent.discard(microbatch)
        if cluster.resumed_at is None:
            cluster.resumed_at = time.monotonic()
        if microbatch in cluster.again:
            cluster.again.discard(microbatch)
            return False
        if cluster.open.pop(microbatch, None) is None:
            self._ledger.applied_twice += 1
            reason = f"{node_id} reported microbatch {microbatch} done, which was not under way"
            self._course.emit("applied_twice", reason, microbatch=microbatch)
            raise RefusedError(reason)
        self._count(cluster, microbatch)
        return True

    def was_completed(self, cluster: ClusterRun, microbatch: int) -> None:
        """Every stage has applied this one, and word of that was lost with the root."""
        if cluster.open.pop(microbatch, None) is not None:
            self._count(cluster, microbatch)

    def _count(self, cluster: ClusterRun, microbatch: int) -> None:
        entry = self._ledger.complete(microbatch)
        assert entry is not None, "what a cluster has under way is in the ledger"
        cluster.samples += entry.samples

    def lose(self, cluster: ClusterRun, reason: str) -> int:
        """This cluster does not train any more: what it has not completed is fed to the others; how much that is."""
        left, evaluations = self.clusters.lose(cluster, reason)
        self._ledger.replay([item.microbatch for item in left])
        if left or evaluations:
            self.replaying += 1
            self._course.spawn(self._replay(left, evaluations))
        self._course.notify()
        return len(left)

    async def again(self, cluster: ClusterRun, left: Sequence[FedMicrobatch], lacks: Callable[[], bool]) -> bool:
        """Feeds these, in order, to a cluster that has been formed anew, and what it had to evaluate. Before anything
        new: microbatches are applied in the same order everywhere. False once the cluster `lacks` somebody: it is to be
        formed once more, and all of it to be fed then."""
        cluster.retained |= {kept.item.microbatch: kept for kept in left}
        for item, ends in left:
            while cluster.room_to_send <= 0 and not lacks():
                await self._course.until(lambda: cluster.room_to_send > 0 or lacks())
            if lacks():
                return False
            await self._train_on(cluster, item, ends)
        if cluster.evaluating:
            # With the weights that all of it has gone into.
            await self._course.until(lambda: not cluster.sent or lacks())
        for evaluation in list(cluster.evaluating.values()):
            marks = Marks(train=False, samples=evaluation.samples)
            await self._send(cluster, evaluation.tensors, evaluation.microbatch, marks)
        return not lacks()

    async def _replay(self, left: list[TrainBatch], evaluations: list[EvalBatch]) -> None:
        walk = self._walks
        try:
            for evaluation in evaluations:
                await self._evaluate(evaluation, walk)
            for number, item in enumerate(left):
                ends = item.completes_update or number == len(left) - 1
                # Also while nothing else is begun: until it is done again, nothing comes to rest.
                while (cluster := self.clusters.for_batch()) is None and walk == self._walks:
                    await self._course.until(lambda: self.clusters.for_batch() is not None or walk != self._walks)
                if cluster is None or walk != self._walks:
                    return
                await self._feed(cluster, replace(item, flush=item.flush or ends), ends, 0)
        finally:
            self.replaying -= 1
            self._course.notify()

    async def _room(self) -> ClusterRun:
        # Again after each wait: what a lost cluster left is fed at the same time, and may have taken the room.
        while (cluster := self._hungry()) is None:
            await self._course.until(lambda: self._hungry() is not None)
        return cluster

    def _hungry(self) -> ClusterRun | None:
        # What belongs to an update that has begun is fed all the same: else nothing could ever come to rest.
        return None if self.paused and self.clusters.group is None else self.clusters.for_batch()

    async def _feed(self, cluster: ClusterRun, item: TrainBatch, ends: bool, checkpoint: int) -> None:
        """With `ends`, the microbatch completes an update of this cluster."""
        self._progress.clock.run()
        mark = None
        if self.clusters.group is None:
            mark, cluster.mark = cluster.mark, None
        self.clusters.group = None if ends else cluster
        replica = self.replica(cluster, item) if ends and not self.claims else 0
        cluster.open[item.microbatch] = item
        cluster.retained[item.microbatch] = FedMicrobatch(item, ends)
        cluster.fed_samples += item.samples
        await self._train_on(cluster, item, ends, checkpoint, mark, replica)

    async def _train_on(
        self,
        cluster: ClusterRun,
        item: TrainBatch,
        ends: bool,
        checkpoint: int = 0,
        mark: RoundMark | None = None,
        replica: int = 0,
    ) -> None:
        cluster.sent.add(item.microbatch)
        marks = Marks(
            samples=item.samples,
            checkpoint=checkpoint,
            # After a cluster was lost, an update may have fewer microbatches here than elsewhere.
            flush=item.flush or (ends and len(self.clusters.all) > 1),
            round=mark.round if mark is not None else 0,
            fragment=mark.fragment if mark is not None else 0,
            updates=item.after.updates,
            replica=replica,
        )
        sending = self._send(cluster, item.tensors, item.microbatch, marks)
        # Shielded: an interrupt between two stages would leave a microbatch that can never be completed.
        await asyncio.shield(asyncio.create_task(sending))

    async def _send(self, cluster: ClusterRun, tensors: Mapping[str, Any], microbatch: int, marks: Marks) -> None:
        generation, sizes = cluster.generation, sizes_of(self.inputs, tensors)
        for node_id, names in cluster.inputs_of:
            frame = Frame(
                kind=FrameKind.FEED,
                microbatch=microbatch,
                marks=marks,
                generation=generation,
                tensors={name: tensors[name] for name in names},
                sizes=sizes,
            )
            if cluster.is_lost or cluster.generation != generation:
                # It is fed again, to others or once the cluster has been formed anew.
                return
            with contextlib.suppress(PeerError):
                # That one is gone is heard elsewhere, with the reason.
                await self._swarm.feed_frame(node_id, frame)
