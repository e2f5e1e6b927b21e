"""When rounds begin: after their interval, or at once when a provider is about to leave."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from ravnest.averaging.deadlines import Deadlines
from ravnest.coordinator.averaging.round_interval import RoundInterval
from ravnest.coordinator.averaging.rounds import Rounds
from ravnest.coordinator.averaging.schedule import AveragingSchedule
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    ProviderMessage,
    RingApplied,
    RingJoined,
    RingReduced,
    RoundJoined,
)
from ravnest.planner.averaging import RoundBasis
from ravnest.planner.plan import RingPlan
from ravnest.planner.rings.round_time import RoundTime
from ravnest.planner.rings.tensors import RingTensors
from ravnest.settings import Averaging

OWNERS = ("a", "b")


class Fed:
    """A run with two clusters of one provider each, which are fed by hand."""

    def __init__(self, every: int = 1000) -> None:
        self.events: list[tuple[str, str]] = []
        self.told: list[tuple[str, CoordinatorMessage]] = []
        self.changed = asyncio.Event()
        plan = RingPlan(0, 0, OWNERS, RingTensors(), "int8", 8192)
        self.rounds = Rounds(
            [plan],
            "d",
            None,
            Deadlines(5.0, 5.0, 5.0),
            lambda node, message: self.told.append((node, message)),
            lambda kind, reason, **rest: self.events.append((kind, reason)),
            self.changed.set,
        )
        self.clusters = [SimpleNamespace(nodes=(n,), is_forming=False, fed_samples=0, mark=None) for n in OWNERS]
        whole = SimpleNamespace(whole=self.clusters, group=None)
        self.dispatcher = SimpleNamespace(clusters=whole, claims={}, replaying=0, fed_samples=0, fed_place=None)
        checkpointer = SimpleNamespace(under_way=False, due=lambda place: None)
        basis = RoundBasis(Averaging(every=every), (1.0, 1.0), 1, 1, 1, RoundTime())
        interval = RoundInterval(basis, lambda *_, **__: None)
        self.schedule = AveragingSchedule(
            cast(Any, SimpleNamespace(until=self.until)),
            cast(Any, self.dispatcher),
            cast(Any, checkpointer),
            self.rounds,
            interval,
            False,
        )

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()

    async def feed(self, samples: int) -> None:
        await self.schedule.before_batch()
        self.dispatcher.fed_samples += samples
        for cluster in self.clusters:
            cluster.fed_samples += samples // 2

    def average(self) -> None:
        """Both owners do their part of the round."""
        where: dict[str, Any] = {"deployment": "d", "round": self.rounds.begun}
        for node in OWNERS:
            joined = RingJoined(ring=0, samples=4, norm=1.0, finite=True, committed=0)
            self.rounds.heard(node, ProviderMessage(round_joined=RoundJoined(**where, rings=[joined])))
        for node in OWNERS:
            self.rounds.heard(node, ProviderMessage(ring_reduced=RingReduced(**where, ring=0, attempt=1, digest=7)))
        for node in OWNERS:
            self.rounds.heard(node, ProviderMessage(ring_applied=RingApplied(**where, ring=0)))


def test_a_round_begins_when_it_is_due_and_names_the_codec_and_the_pieces_of_its_ring() -> None:
    async def test() -> None:
        fed = Fed(every=20)
        for _ in range(2):
            await fed.feed(10)
        assert not fed.rounds.under_way
        await fed.feed(10)
        assert fed.rounds.under_way and fed.events == [("round_begun", "20 samples since the last one")]
        fed.average()
        begun = [message.ring_begin for _, message in fed.told if message.HasField("ring_begin")]
        assert [(each.codec, each.piece_values, each.urgent) for each in begun] == [("int8", 8192, False)] * 2
        assert not fed.rounds.under_way

    asyncio.run(test())


def test_what_a_cluster_has_learned_is_averaged_before_its_provider_leaves() -> None:
    async def test() -> None:
        fed = Fed()
        await fed.feed(10)
        leaving = asyncio.create_task(fed.schedule.soon("b leaves"))
        await asyncio.sleep(0)
        assert not fed.rounds.under_way, "a round begins with a microbatch"
        await fed.feed(10)
        assert fed.events == [("round_begun", "b leaves")] and not leaving.done()
        fed.average()
        await asyncio.wait_for(leaving, 5)
        assert fed.rounds.counted_samples(["b"]) == 5, "everything that was fed before the round counts"
        await fed.feed(10)
        assert not fed.rounds.under_way, "one round was asked for"

    asyncio.run(test())


def test_nobody_waits_for_a_round_that_cannot_begin() -> None:
    async def test() -> None:
        fed = Fed()
        leaving = asyncio.create_task(fed.schedule.soon("b leaves"))
        await asyncio.sleep(0)
        fed.clusters.pop()
        fed.changed.set()
        await asyncio.wait_for(leaving, 5)
        fed = Fed()
        leaving = asyncio.create_task(fed.schedule.soon("b leaves"))
        await asyncio.sleep(0)
        fed.schedule.close()
        fed.changed.set()
        await asyncio.wait_for(leaving, 5)

    asyncio.run(test())
