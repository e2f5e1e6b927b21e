"""When the clusters of a run average: in the background every so many samples, and with nothing in flight where all of
them are to be alike."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.coordinator.feed.cluster_state import RoundMark
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.run.checkpointer import Checkpointer
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.errors import DiskFullError
from ravnest.net.v1.control_pb2 import Average, CoordinatorMessage

_TRIES: Final = 3


class AveragingRun:
    """The rounds of a run with several clusters."""

    def __init__(
        self,
        course: Course,
        feeding: Dispatcher,
        checkpointing: Checkpointer,
        rounds: Rounds,
        ledger: Ledger,
        deployment: str,
        every_samples: int,
        blocking: bool,
        say: Callable[[str], None],
    ) -> None:
        """`say` tells the user something."""
        self.rounds = rounds
        self._course = course
        self._feeding = feeding
        self._checkpointing = checkpointing
        self._ledger = ledger
        self._deployment = deployment
        self._every = every_samples
        self._blocking = blocking
        self._say = say
        self.over = False
        """Whether another formation has taken the place of this one."""
        self._announced_at = feeding.fed_samples
        """Samples that had been fed at the last round."""
        self._alike_at = 0
        """Samples that had been fed when all clusters were alike."""

    async def before_batch(self) -> None:
        """Begins a round with the next microbatch, where one is due: what was fed before goes into it, it does not."""
        feeding, rounds = self._feeding, self.rounds
        # Only between two updates: what goes into a round has been applied as a whole.
        if self.over or feeding.clusters.group is not None or rounds.under_way or self._checkpointing.under_way:
            return
        if feeding.claims:
            return
        if len(feeding.clusters.whole) < 2:
            return
        since = feeding.fed_samples - self._announced_at
        checkpoint = None if feeding.replaying else self._checkpointing.due(feeding.fed_place)
        if since < self._every and checkpoint is None:
            return
        reason = checkpoint or f"{since} samples since the last one"
        if self._blocking:
            await self.now(reason)
            if checkpoint is not None:
                # One for which the disk has no room has been told of, and the next may find some.
                with suppress(DiskFullError):
                    await self._checkpointing.now()
            return
        number = rounds.begun + 1
        all_rings = checkpoint is not None or rounds.fragments == 1
        self._begin(0 if all_rings else (number - 1) % rounds.fragments + 1, reason)
        if checkpoint is not None:
            self._checkpointing.expected = True
            self._course.spawn(self._save(feeding.fed_place, checkpoint))

    @property
    def alike(self) -> bool:
        """Whether all clusters have the same model, and have trained on nothing since."""
        return self._alike_at == self._feeding.fed_samples

    async def now(self, reason: str) -> None:
        """Averages everything learned so far in all rings, with nothing in flight; all clusters are then equal."""
        feeding, rounds = self._feeding, self.rounds
        for _ in range(_TRIES):
            while not self.over and (rounds.under_way or not self._settled()):
                await self._course.until(lambda: self.over or self._settled())
                if rounds.under_way and not self.over:
                    await self._order()
                    await self._course.until(lambda: not rounds.under_way)
            if self.over:
                return
            if len(feeding.clusters.whole) < 2 or self._alike_at == feeding.fed_samples:
                return
            self._begin(0, reason)
            await self._order()
            await self._course.until(lambda: not rounds.under_way)
            if rounds.complete:
                self._alike_at = feeding.fed_samples
                return
        self._say(f"the clusters could not all be averaged {reason}: {rounds.last}")

    def _settled(self) -> bool:
        clusters = self._feeding.clusters.whole
        return not self._ledger.outstanding and not any(cluster.is_forming or cluster.again for cluster in clusters)

    def _begin(self, fragment: int, reason: str) -> None:
        # One that is being formed anew has nothing to bring, and is not waited for.
        clusters = [cluster for cluster in self._feeding.clusters.whole if not cluster.is_forming]
        self._announced_at = self._feeding.fed_samples
        owners = {node: cluster.fed_samples for cluster in clusters for node in cluster.nodes}
        number = self.rounds.announce(fragment, owners, reason)
        for cluster in clusters:
            cluster.mark = RoundMark(number, fragment)

    async def _order(self) -> None:
        """Tells those of the round who have not heard of it with a microbatch; none is in flight there."""
        for cluster in self._feeding.clusters.whole:
            mark, cluster.mark = cluster.mark, None
            if mark is None:
                continue
            for node_id in cluster.nodes:
                order = Average(deployment=self._deployment, round=mark.round, fragment=mark.fragment)
                await self._course.tell(node_id, CoordinatorMessage(average=order))

    async def _save(self, place: DataPosition, why: str) -> None:
        """Once the round under way counts for all, saves what they have since: the data up to this place."""
        try:
            await self._course.until(lambda: not self.rounds.under_way)
            if self.rounds.complete and not self.over:
                await self._checkpointing.after_round(place, why)
        finally:
            if not self.over:
                self._checkpointing.expected = False
                self._course.notify()
