"""Taking checkpoints while a run goes on: which cluster is saved, when, and what its stages upload.

One cluster's stages make a checkpoint. Where there are several clusters it is taken after a round, of the parameters
that all have since then; where there is one, its stages save right after a microbatch.
"""

import re
from collections.abc import AsyncIterator, Callable

from ravnest.coordinator.checkpoints import CheckpointInfo
from ravnest.coordinator.clusters import ClusterRun
from ravnest.coordinator.course import Course
from ravnest.coordinator.feeder import TrainBatch
from ravnest.coordinator.ledger import Ledger, Place
from ravnest.coordinator.run_plan import ClusterPlan
from ravnest.coordinator.saving import Mark, Saver
from ravnest.coordinator.stage_parts import BadPartError
from ravnest.coordinator.swarm import Swarm
from ravnest.errors import RefusedError, RunError
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Save


class Checkpointing:
    """The checkpoints of a run."""

    def __init__(
        self,
        course: Course,
        swarm: Swarm,
        make_saver: Callable[[ClusterPlan], Saver],
        cluster: ClusterRun,
        deployment: str,
        ledger: Ledger,
    ) -> None:
        """Of this cluster, to begin with; `make_saver` makes what writes the checkpoints of one."""
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
        self._cluster = cluster
        self._saver = make_saver(cluster.plan)

    @property
    def has_saved(self) -> bool:
        """Whether there is one of this run to go on from."""
        return self.last is not None or self._saver.whole

    @property
    def under_way(self) -> bool:
        return self._saver.under_way or self.expected

    def due(self, place: Place) -> str | None:
        """Why one should be taken now, or None."""
        return None if self.expected else self._saver.due(place.updates)

    def with_microbatch(self, item: TrainBatch) -> int:
        """The number of the checkpoint to be taken with this microbatch, or 0; RunError when the disk refuses."""
        why = self.due(item.after) if item.completes_update else None
        if why is None:
            return 0
        number = item.microbatch + 1
        self._saver.begin(Mark(number, item.after, self._ledger.counts()))
        self._course.emit("checkpoint_begun", why, microbatch=item.microbatch)
        return number

    async def after_round(self, place: Place, why: str) -> None:
        """Saves what all clusters have since the last round, which stands at this place in the data."""
        number = place.microbatches
        self._saver.begin(Mark(number, place, self._ledger.counts()))
        self._course.emit("checkpoint_begun", why, microbatch=number)
        await self._order(number, anchored=True)

    async def now(self) -> CheckpointInfo:
        """Nothing is in flight: saves where the run stands."""
        saver = self._saver
        await self._course.until(lambda: not self.under_way)
        number = self._ledger.completed + 1
        saver.begin(Mark(number, self._ledger.applied, self._ledger.counts()))
        await self._order(number, anchored=False)
        # A stage reports before it says that it has saved: after this, the summary has its last counts.
        await self._course.until(lambda: self._saver is not saver or self._all_saved(number))
        if self._saver is not saver:
            # The cluster that was being saved is lost, and another has what it had.
            return await self.now()
        assert self.last is not None
        return self.last

    def move_to(self, cluster: ClusterRun) -> None:
        """From now on this cluster is saved: the one before is lost, and what it had begun to upload."""
        self._saver.abort()
        self._cluster, self._saver = cluster, self._make_saver(cluster.plan)
        self._course.notify()

    def is_of(self, cluster: ClusterRun) -> bool:
        return self._cluster is cluster

    def saved(self, node_id: str, number: int) -> None:
        """A stage says that its part of this one has been uploaded."""
        self._saved[node_id] = number
        self._course.notify()

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Takes a stage's part. RefusedError for one that is not the provider's to upload."""
        number = name.removeprefix("checkpoint-")
        stage = next((stage.stage for stage in self._cluster.plan.stages if stage.node == node_id), None)
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

    async def _order(self, number: int, anchored: bool) -> None:
        for node_id in self._cluster.nodes:
            order = Save(deployment=self._deployment, checkpoint=number, anchored=anchored)
            await self._course.tell(node_id, CoordinatorMessage(save=order))

    def _all_saved(self, number: int) -> bool:
        return all(self._saved.get(node) == number for node in self._cluster.nodes)
