"""Messages of the coordinator to the owners of a ring during a round."""

import asyncio
from collections import defaultdict
from typing import Any

from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    ProviderMessage,
    RingFailed,
    RingJoined,
    RingReduced,
    RingStanding,
    RoundJoined,
)
from ravnest.planner.plan import RingPlan
from ravnest.planner.rings.tensors import RingTensors

OWNERS = ("a", "b", "c")


class Told:
    """A coordinator's rounds of one ring, and the messages and events that come from them."""

    def __init__(self) -> None:
        self.messages: dict[str, list[CoordinatorMessage]] = defaultdict(list)
        self.events: list[tuple[str, dict[str, Any]]] = []
        plan = RingPlan(0, 0, OWNERS, RingTensors())
        self.rounds = Rounds([plan], "d1", None, Deadlines(5.0, 5.0, 5.0), self._tell, self._emit, lambda: None)

    def hear(self, node: str, **body: Any) -> None:
        self.rounds.heard(node, ProviderMessage(**body))

    def join(self, node: str, committed: int = 0, samples: int = 8) -> None:
        joined = RingJoined(ring=0, samples=samples, norm=1.0, finite=True, committed=committed)
        self.hear(node, round_joined=RoundJoined(deployment="d1", round=self.rounds.begun, rings=[joined]))

    def last(self, node: str) -> CoordinatorMessage:
        return self.messages[node][-1]

    def _tell(self, node: str, message: CoordinatorMessage) -> None:
        self.messages[node].append(message)

    def _emit(self, kind: str, reason: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def test_one_that_catches_up_with_an_older_round_is_told_which_one_it_is() -> None:
    async def test() -> None:
        told = Told()
        stands = {node: [RingStanding(ring=0, committed=5 + number)] for number, node in enumerate(OWNERS)}
        told.rounds.take_over(stands, dict.fromkeys(OWNERS, 8))
        # c is the only owner with round 7, and has no part in this round.
        told.rounds.announce(0, {"a": 8, "b": 8}, "a test")
        told.join("a", committed=5)
        told.join("b", committed=6)
        orders = {node: told.last(node).ring_catch_up for node in ("a", "b")}
        assert {node: (o.node, o.donate, o.committed) for node, o in orders.items()} == {
            "a": ("b", False, 6),
            "b": ("a", True, 6),
        }
        told.rounds.close()

    asyncio.run(test())


def test_messages_of_another_round_or_deployment_or_ring_change_nothing() -> None:
    async def test() -> None:
        told = Told()
        told.rounds.announce(0, dict.fromkeys(OWNERS, 8), "a test")
        for node in OWNERS:
            told.join(node)
        assert [told.last(node).ring_begin.index for node in OWNERS] == [0, 1, 2]
        for deployment, round, ring in (("d2", 1, 0), ("d1", 2, 0), ("d1", 1, 9)):
            where = {"deployment": deployment, "round": round, "ring": ring, "attempt": 1}
            for node in OWNERS:
                told.hear(node, ring_reduced=RingReduced(**where, digest=7))
            told.hear("a", ring_failed=RingFailed(**where, reason="out of memory"))
        assert told.rounds.under_way and [len(told.messages[node]) for node in OWNERS] == [1, 1, 1]
        for node in OWNERS:
            told.hear(node, ring_reduced=RingReduced(deployment="d1", round=1, attempt=1, digest=7))
        assert [told.last(node).ring_commit.attempt for node in OWNERS] == [1, 1, 1]
        told.rounds.close()

    asyncio.run(test())
