"""Dispatcher: feeds each microbatch to the cluster with the most room, and again after a loss."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters, FedMicrobatch, RoundMark
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition, LedgerEntry
from ravnest.coordinator.run.context import RunContext
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import ValueSpec
from ravnest.graph.sizes import sizes_of
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind


class Dispatcher:
    """The dispatcher of a run, for all its deployments."""

    def __init__(self, context: RunContext, inputs: Sequence[ValueSpec]) -> None:
        """`inputs` are those of the whole model; every stage is told their free sizes with each microbatch."""
        self.announce_replica: Callable[[ClusterRun, TrainBatch], int] = lambda cluster, item: 0
        """Returns the number of the replica that a cluster keeps with a microbatch, or 0."""
        self.clusters = Clusters(())
        """The clusters of the current deployment."""
        self.fed_samples = 0
        self.fed_place: DataPosition = context.ledger.applied
        """The position in the data up to which microbatches have been fed."""
        self.replaying = 0
        """The number of lost clusters whose microbatches have not all been fed again."""
        self.claims: dict[int, tuple[ClusterRun, bool]] = {}
        """Once stages were resumed, the microbatches that they had applied since the record: which cluster, and
        whether all of its stages have."""
        self.paused = ""
        """Why no further update is begun; empty while updates are begun."""
        self._inputs = inputs
        self._rewinds = 0
        """How often the data has been walked again from an earlier position."""
        self._context = context

    async def batch(self, item: TrainBatch, checkpoint: Callable[[], int]) -> None:
        """Feeds a microbatch once there is room for it. Only then is `checkpoint` called; it returns the number of the
        checkpoint to take with the microbatch, or 0."""
        claim = self.claims.get(item.microbatch)
        if claim is not None and await self._settle_claim(item, *claim):
            return
        cluster = await self._room()
        self._begin(item)
        await self._feed(cluster, item, item.completes_update, checkpoint())

    async def _settle_claim(self, item: TrainBatch, cluster: ClusterRun, is_whole: bool) -> bool:
        """Counts a microbatch that a cluster has applied, or feeds it to the cluster again if some of its stages lack
        it. False if the cluster is lost: the microbatch is then fed like any other."""
        if not is_whole:
            await self._context.until(lambda: cluster.is_lost or cluster.room > 0)
        self.claims.pop(item.microbatch, None)
        if cluster.is_lost:
            return False
        self._begin(item)
        self.clusters.group = None if item.completes_update else cluster
        cluster.fed_samples += item.samples
        if is_whole:
            self._count(cluster, item.microbatch)
            return True
        self._context.ledger.replayed += 1
        cluster.open[item.microbatch] = item
        cluster.retained[item.microbatch] = FedMicrobatch(item, item.completes_update)
        await self._train_on(cluster, item, item.completes_update)
        return True

    def _begin(self, item: TrainBatch) -> None:
        entry = LedgerEntry(item.microbatch, item.samples, item.after, item.completes_update)
        self._context.progress.epochs.current = item.after.epoch
        self._context.ledger.feed(entry)
        self._context.recorder.fed(item.microbatch, item.after)
        self.fed_samples += item.samples
        self.fed_place = item.after

    async def evaluation(self, item: EvalBatch) -> None:
        """Feeds a batch to be evaluated once there is room for it."""
        await self._evaluate(item, self._rewinds)

    def rewind(self, place: DataPosition) -> None:
        """The data is walked again from this position. Microbatches of lost clusters that wait to be fed again are
        dropped, because they come again with the data."""
        self._rewinds += 1
        self.fed_place = place
        self._context.notify()

    async def _evaluate(self, item: EvalBatch, rewinds: int) -> None:
        while (cluster := self.clusters.for_evaluation()) is None and rewinds == self._rewinds:
            await self._context.until(lambda: self.clusters.for_evaluation() is not None or rewinds != self._rewinds)
        if cluster is None or rewinds != self._rewinds:
            return
        cluster.evaluating[item.microbatch] = item
        await self._send(cluster, item.tensors, item.microbatch, Marks(train=False, samples=item.samples))

    def completed(self, node_id: str, microbatch: int) -> bool:
        """A root reports that every stage of its cluster has applied a microbatch; whether that is the first time.
        RefusedError if the microbatch was not in flight there."""
        cluster = self.clusters.of(node_id)
        if cluster is None:
            # The cluster was lost meanwhile, and other clusters are fed what it had not completed.
            return False
        cluster.sent.discard(microbatch)
        if cluster.resumed_at is None:
            cluster.resumed_at = time.monotonic()
        if microbatch in cluster.again:
            cluster.again.discard(microbatch)
            return False
        if cluster.open.pop(microbatch, None) is None:
            self._context.ledger.applied_twice += 1
            reason = f"{node_id} reported microbatch {microbatch} done, which was not in flight"
            self._context.emit("applied_twice", reason, microbatch=microbatch)
            raise RefusedError(reason)
        self._count(cluster, microbatch)
        return True

    def was_completed(self, cluster: ClusterRun, microbatch: int) -> None:
        """Counts a microbatch that every stage has applied, although the root that should report it was lost."""
        if cluster.open.pop(microbatch, None) is not None:
            self._count(cluster, microbatch)

    def _count(self, cluster: ClusterRun, microbatch: int) -> None:
        entry = self._context.ledger.complete(microbatch)
        assert entry is not None, "the ledger has every microbatch in flight"
        cluster.samples += entry.samples

    def lose(self, cluster: ClusterRun, reason: str) -> int:
        """Ends the training of a cluster. The others are fed what it had not completed; returns the number of these
        microbatches."""
        left, evaluations = self.clusters.lose(cluster, reason)
        self._context.ledger.replay([item.microbatch for item in left])
        if left or evaluations:
            self.replaying += 1
            self._context.spawn(self._replay(left, evaluations))
        self._context.notify()
        return len(left)

    async def replay(
        self, cluster: ClusterRun, left: Sequence[FedMicrobatch], is_incomplete: Callable[[], bool]
    ) -> bool:
        """Feeds these microbatches, in order, to a cluster that has been linked again, then its evaluations.

        Microbatches are applied in the same order everywhere, so nothing new is fed before. False once the cluster
        `is_incomplete`: it has to be rebuilt again, and all of this is fed then.
        """
        cluster.retained |= {kept.item.microbatch: kept for kept in left}
        for item, ends in left:
            while cluster.room_to_send <= 0 and not is_incomplete():
                await self._context.until(lambda: cluster.room_to_send > 0 or is_incomplete())
            if is_incomplete():
                return False
            await self._train_on(cluster, item, ends)
        if cluster.evaluating:
            # The weights must include all of the replayed microbatches.
            await self._context.until(lambda: not cluster.sent or is_incomplete())
        for evaluation in list(cluster.evaluating.values()):
            marks = Marks(train=False, samples=evaluation.samples)
            await self._send(cluster, evaluation.tensors, evaluation.microbatch, marks)
        return not is_incomplete()

    async def _replay(self, left: list[TrainBatch], evaluations: list[EvalBatch]) -> None:
        rewinds = self._rewinds
        try:
            for evaluation in evaluations:
                await self._evaluate(evaluation, rewinds)
            for number, item in enumerate(left):
                ends = item.completes_update or number == len(left) - 1
                # This also goes on while the dispatcher is paused: the run cannot drain before.
                while (cluster := self.clusters.for_batch()) is None and rewinds == self._rewinds:
                    await self._context.until(lambda: self.clusters.for_batch() is not None or rewinds != self._rewinds)
                if cluster is None or rewinds != self._rewinds:
                    return
                await self._feed(cluster, replace(item, flush=item.flush or ends), ends, 0)
        finally:
            self.replaying -= 1
            self._context.notify()

    async def _room(self) -> ClusterRun:
        # A loop, because the replay of a lost cluster may take the room first.
        while (cluster := self._next_cluster()) is None:
            await self._context.until(lambda: self._next_cluster() is not None)
        return cluster

    def _next_cluster(self) -> ClusterRun | None:
        # An update that has begun is completed even while the dispatcher is paused: otherwise the run never drains.
        return None if self.paused and self.clusters.group is None else self.clusters.for_batch()

    async def _feed(self, cluster: ClusterRun, item: TrainBatch, ends: bool, checkpoint: int) -> None:
        """Feeds a new microbatch; with `ends`, it completes an update of this cluster."""
        self._context.progress.clock.run()
        mark = None
        if self.clusters.group is None:
            mark, cluster.mark = cluster.mark, None
        self.clusters.group = None if ends else cluster
        replica = self.announce_replica(cluster, item) if ends and not self.claims else 0
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
            # After the loss of a cluster, an update may have fewer microbatches here than elsewhere.
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
        generation, sizes = cluster.generation, sizes_of(self._inputs, tensors)
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
                # The microbatch is fed again: to another cluster, or to this one when it has been rebuilt.
                return
            with contextlib.suppress(PeerError):
                # The swarm reports a provider that is gone, with the reason.
                await self._context.swarm.feed_frame(node_id, frame)
