"""Feeding the clusters: each microbatch goes to the one with most room, and again to another where that one is lost."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from ravnest.coordinator.clusters import ClusterRun, Clusters, RoundMark
from ravnest.coordinator.course import Course
from ravnest.coordinator.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.ledger import Entry, Ledger, Place
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.recording import Recorder
from ravnest.coordinator.swarm import Swarm
from ravnest.errors import PeerError, RefusedError, TrainingError
from ravnest.net.frames import Frame, FrameKind

BETTER_REASON_SECONDS: Final = 1.0
"""How long the reason is waited for why a provider cannot be reached: who it was told by says more."""


class Feeding:
    """What is fed, and what has come of it."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        clusters: Clusters,
        generation: int,
        ledger: Ledger,
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        self.clusters = clusters
        self.fed_samples = 0
        self.fed_place: Place = ledger.applied
        """Where the run stands once all that was fed has been applied."""
        self.replaying = 0
        """How many clusters were lost whose microbatches have not all been fed again."""
        self._course = course
        self._swarm = swarm
        self._generation = generation
        self._ledger = ledger
        self._recorder = recorder
        self._progress = progress

    async def batch(self, item: TrainBatch, checkpoint: Callable[[], int]) -> None:
        """Feeds a microbatch, once there is room for it; then `checkpoint` says the number of the one that is to be
        taken with it, or 0."""
        cluster = await self._room()
        entry = Entry(item.microbatch, item.samples, item.after, item.completes_update)
        self._progress.epoch = item.after.epoch
        self._ledger.feed(entry)
        self._recorder.fed(item.microbatch, item.after)
        self.fed_samples += item.samples
        self.fed_place = item.after
        await self._feed(cluster, item, item.completes_update, checkpoint())

    async def evaluation(self, item: EvalBatch) -> None:
        """Feeds a batch to be evaluated, once there is room for it."""
        while (cluster := self.clusters.for_evaluation()) is None:
            await self._course.until(lambda: self.clusters.for_evaluation() is not None)
        cluster.evaluating[item.microbatch] = item
        await self._send(cluster, item.tensors, item.microbatch, item.samples, train=False)

    def completed(self, node_id: str, microbatch: int) -> None:
        """A root says that a microbatch has been applied by every stage of its cluster. RefusedError when it was not
        under way there."""
        cluster = self.clusters.of(node_id)
        if cluster is None:
            # It was given up in the meantime, and others do what it had left.
            return
        if cluster.open.pop(microbatch, None) is None:
            self._ledger.applied_twice += 1
            reason = f"{node_id} reported microbatch {microbatch} done, which was not under way"
            self._course.emit("applied_twice", reason, microbatch=microbatch)
            raise RefusedError(reason)
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

    async def _replay(self, left: list[TrainBatch], evaluations: list[EvalBatch]) -> None:
        try:
            for evaluation in evaluations:
                await self.evaluation(evaluation)
            for number, item in enumerate(left):
                ends = item.completes_update or number == len(left) - 1
                await self._feed(await self._room(), replace(item, flush=item.flush or ends), ends, 0)
        finally:
            self.replaying -= 1
            self._course.notify()

    async def _room(self) -> ClusterRun:
        # Again after each wait: what a lost cluster left is fed at the same time, and may have taken the room.
        while (cluster := self.clusters.for_batch()) is None:
            await self._course.until(lambda: self.clusters.for_batch() is not None)
        return cluster

    async def _feed(self, cluster: ClusterRun, item: TrainBatch, ends: bool, checkpoint: int) -> None:
        """With `ends`, the microbatch completes an update of this cluster."""
        self._progress.run_clock()
        mark = None
        if self.clusters.group is None:
            mark, cluster.mark = cluster.mark, None
        self.clusters.group = None if ends else cluster
        cluster.open[item.microbatch] = item
        cluster.fed_samples += item.samples
        sending = self._send(
            cluster,
            item.tensors,
            item.microbatch,
            item.samples,
            checkpoint=checkpoint,
            # What belongs to an update may be fewer here than elsewhere, after a cluster was lost.
            flush=item.flush or (ends and len(self.clusters.all) > 1),
            mark=mark,
            updates=item.after.updates,
        )
        # Shielded: an interrupt between two stages would leave a microbatch that can never be completed.
        await asyncio.shield(asyncio.create_task(sending))

    async def _send(
        self,
        cluster: ClusterRun,
        tensors: Mapping[str, Any],
        microbatch: int,
        samples: int,
        *,
        train: bool = True,
        checkpoint: int = 0,
        flush: bool = False,
        mark: RoundMark | None = None,
        updates: int = 0,
    ) -> None:
        for node_id, names in cluster.inputs_of:
            frame = Frame(
                kind=FrameKind.FEED,
                microbatch=microbatch,
                train=train,
                samples=samples,
                checkpoint=checkpoint,
                generation=self._generation,
                flush=flush,
                round=mark.round if mark is not None else 0,
                fragment=mark.fragment if mark is not None else 0,
                updates=updates,
                tensors={name: tensors[name] for name in names},
            )
            try:
                await self._swarm.feed_frame(node_id, frame)
            except PeerError as error:
                # Why it is gone is told in a moment, and says more. Where others go on, they do what is left.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BETTER_REASON_SECONDS):
                        await self._course.until(lambda: bool(cluster.lost))
                        return
                raise TrainingError(f"{node_id} cannot be fed: {error}") from None
