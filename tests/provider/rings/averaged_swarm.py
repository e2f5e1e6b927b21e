"""Clusters in one process with the coordinator's real rounds."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.net.v1.control_pb2 import Average, CoordinatorMessage
from tests.provider.rings.joined_rings import DEPLOYMENT, JoinedRings, Owner


class AveragedSwarm(JoinedRings):
    """Clusters with a coordinator that hears their reports and sends its orders to them."""

    def __init__(self, cuts: Sequence[Sequence[int]], outlier: float | None = None, **more: Any) -> None:
        super().__init__(cuts, **more)
        self.events: list[dict[str, Any]] = []
        self.keep_back: Callable[[str, CoordinatorMessage], bool] = lambda node_id, message: False
        """Selects the orders that the owners do not receive."""
        self.kept: list[tuple[str, CoordinatorMessage]] = []
        self.deadlines = Deadlines(5.0, 5.0, 5.0)
        self._over = asyncio.Event()
        self._held: list[tuple[str, CoordinatorMessage]] | None = None
        self._outlier = outlier
        self.rounds = self._rounds()
        self._hearing = [asyncio.create_task(self._hear(owner)) for owner in self.owners.values()]

    async def __aexit__(self, *error: object) -> None:
        for task in self._hearing:
            task.cancel()
        self.rounds.close()
        await super().__aexit__(*error)

    def _rounds(self) -> Rounds:
        return Rounds(
            self.plans, DEPLOYMENT, self._outlier, self.deadlines, self._tell, self._emit, lambda: self._over.set()
        )

    def another_coordinator(self) -> None:
        """Replace the coordinator by a new one, which knows only what the owners report."""
        self.rounds.close()
        self.rounds = self._rounds()
        stands = {owner.name: owner.rings.standings() for owner in self.owners.values()}
        # Feeding is counted from the beginning here, and no bound on the samples without a round is known.
        self.rounds.take_over(stands, dict.fromkeys(self.owners, 0))

    def announce(self, fragment: int = 0) -> int:
        self._over.clear()
        fed = {owner.name: cluster.samples for cluster in self.clusters for owner in cluster.owners}
        return self.rounds.announce(fragment, fed, "a test")

    def hold(self) -> None:
        """Deliver the coordinator's orders only after `release`."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for node_id, message in held:
            self._tell(node_id, message)

    async def over(self, complete: bool = True) -> None:
        await self._over.wait()
        assert self.rounds.complete == complete, self.events

    async def average_now(self, complete: bool = True) -> None:
        """A round while nothing is in flight."""
        self.order_snapshots()
        await self.over(complete)

    def order_snapshots(self) -> None:
        """Begin a round while nothing is in flight."""
        number = self.announce()
        for owner in self.owners.values():
            owner.obey(average=Average(deployment=DEPLOYMENT, round=number))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def told(self, kind: str) -> list[str | None]:
        """The providers that the events of this kind are about."""
        return [event.get("provider") for event in self.events if event["kind"] == kind]

    async def _hear(self, owner: Owner) -> None:
        while True:
            message = await owner.said.get()
            self.rounds.heard(owner.name, message)

    def _tell(self, node_id: str, message: CoordinatorMessage) -> None:
        if self.keep_back(node_id, message):
            self.kept.append((node_id, message))
        elif self._held is None:
            self.owners[node_id].rings.obey(message)
        else:
            self._held.append((node_id, message))

    def _emit(self, kind: str, reason: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "reason": reason, **fields})


def check(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name in found:
        difference = (found[name].double() - want[name].double()).abs().max().item()
        assert difference <= 1e-6, (name, difference)
