"""Schedule of the averaging rounds of a deployment with several clusters.

Rounds run in the background every few samples. Before an evaluation, for a checkpoint and at the end, a round runs with
nothing in flight, so that all clusters have the same model afterwards.
"""

from contextlib import suppress
from typing import Final

from ravnest.averaging.patience import Patience
from ravnest.coordinator.averaging.round_interval import RoundInterval
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.coordinator.feed.cluster_state import RoundMark
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.run.checkpointer import Checkpointer
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.errors import DiskFullError
from ravnest.net.v1.control_pb2 import Average, CoordinatorMessage

_MAX_TRIES: Final = 3
"""Maximum number of rounds that are tried in a row to give all clusters the same model."""


class AveragingSchedule:
    """The rounds of one deployment, until it is closed."""

    def __init__(
        self,
        context: RunContext,
        dispatcher: Dispatcher,
        checkpointer: Checkpointer,
        rounds: Rounds,
        interval: RoundInterval,
        blocking: bool,
    ) -> None:
        """`interval` says how many samples are fed between rounds. With `blocking`, feeding stops for each round, which
        runs with nothing in flight."""
        self.rounds = rounds
        rounds.on_measured = interval.learn
        self._context = context
        self._dispatcher = dispatcher
        self._checkpointer = checkpointer
        self._interval = interval
        self._blocking = blocking
        self._is_closed = False
        self._wanted = ""
        """Why a round is to begin before it is due; empty if none is."""
        self._announced_at = dispatcher.fed_samples
        """Samples that had been fed when the last round was announced."""
        self._averaged_at = 0
        """Samples that had been fed when all clusters last had the same model."""

    @property
    def is_averaged(self) -> bool:
        """Whether all clusters have the same model and have been fed nothing since."""
        return self._averaged_at == self._dispatcher.fed_samples

    async def before_batch(self) -> None:
        """Begin a round with the next microbatch, if one is due. The round covers everything fed before it."""
        dispatcher, rounds = self._dispatcher, self.rounds
        # A round begins only between two updates, because an update belongs to a round as a whole.
        if self._is_closed or dispatcher.clusters.group is not None or dispatcher.claims:
            return
        if rounds.under_way or self._checkpointer.under_way or len(dispatcher.clusters.whole) < 2:
            return
        since = dispatcher.fed_samples - self._announced_at
        checkpoint = None if dispatcher.replaying else self._checkpointer.due(dispatcher.fed_place)
        if since < self._interval.now.samples and checkpoint is None and not self._wanted:
            return
        reason = checkpoint or self._wanted or f"{since} samples since the last one"
        if self._blocking:
            await self.now(reason)
            if checkpoint is not None:
                # A full disk has been reported; the next checkpoint may find room again.
                with suppress(DiskFullError):
                    await self._checkpointer.now()
            return
        all_rings = checkpoint is not None or rounds.fragments == 1
        # A checkpoint needs a round that counts for all owners.
        all_rings = all_rings or bool(self._wanted)
        patience = self._interval.patience if checkpoint is None and not self._wanted else None
        self._begin(0 if all_rings else rounds.begun % rounds.fragments + 1, reason, patience)
        if checkpoint is not None:
            self._checkpointer.is_expected = True
            self._context.spawn(self._save(dispatcher.fed_place, checkpoint))

    async def soon(self, reason: str) -> None:
        """Average all rings in the background with the next microbatch. Returns when that round is over, or when no
        round can begin any more."""
        begun, rounds, clusters = self.rounds.begun, self.rounds, self._dispatcher.clusters
        self._wanted = reason

        def is_over() -> bool:
            return self._is_closed or len(clusters.whole) < 2 or (rounds.begun > begun and not rounds.under_way)

        try:
            await self._context.until(is_over)
        finally:
            self._wanted = ""

    async def now(self, reason: str) -> None:
        """Average everything learned so far in all rings, with nothing in flight. All clusters have the same model
        afterwards; if that fails three times, the user is told."""
        dispatcher, rounds = self._dispatcher, self.rounds
        for _ in range(_MAX_TRIES):
            while not self._is_closed and (rounds.under_way or not self._is_drained()):
                await self._context.until(lambda: self._is_closed or self._is_drained())
                if rounds.under_way and not self._is_closed:
                    await self._send_marks()
                    await self._context.until(lambda: not rounds.under_way)
            if self._is_closed or len(dispatcher.clusters.whole) < 2 or self.is_averaged:
                return
            self._begin(0, reason, is_urgent=True)
            await self._send_marks()
            await self._context.until(lambda: not rounds.under_way)
            if rounds.complete:
                self._averaged_at = dispatcher.fed_samples
                return
        self._context.say(f"not all clusters could be averaged {reason}: {rounds.last}")

    def close(self) -> None:
        """End the current round and begin no other one: another deployment replaces this one."""
        self._is_closed = True
        self.rounds.close()

    def _is_drained(self) -> bool:
        return self._dispatcher.clusters.is_drained(self._context.ledger)

    def _begin(self, fragment: int, reason: str, patience: Patience | None = None, is_urgent: bool = False) -> None:
        # A cluster that is being deployed or rebuilt has nothing to contribute.
        clusters = [cluster for cluster in self._dispatcher.clusters.whole if not cluster.is_forming]
        self._announced_at, self._wanted = self._dispatcher.fed_samples, ""
        owners = {node: cluster.fed_samples for cluster in clusters for node in cluster.nodes}
        number = self.rounds.announce(fragment, owners, reason, patience, is_urgent)
        for cluster in clusters:
            cluster.mark = RoundMark(number, fragment)

    async def _send_marks(self) -> None:
        """Tell the owners that have not heard of the round with a microbatch; nothing is in flight there."""
        for cluster in self._dispatcher.clusters.whole:
            mark, cluster.mark = cluster.mark, None
            if mark is None:
                continue
            for node_id in cluster.nodes:
                order = Average(deployment=self.rounds.deployment, round=mark.round, fragment=mark.fragment)
                await self._context.tell(node_id, CoordinatorMessage(average=order))

    async def _save(self, place: DataPosition, why: str) -> None:
        """Save a checkpoint of the data up to this place, once the current round has counted for all owners."""
        try:
            await self._context.until(lambda: not self.rounds.under_way)
            if self.rounds.complete and not self._is_closed:
                await self._checkpointer.after_round(place, why)
        finally:
            if not self._is_closed:
                self._checkpointer.is_expected = False
                self._context.notify()
