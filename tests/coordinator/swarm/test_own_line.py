"""The coordinator's line: learned from its providers, and shared by the state that is sent over it."""

import asyncio

from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.own_line import OwnLine, receiver_limit
from ravnest.net.pacing.budget import PacedTransfer, StateBudget
from ravnest.net.pacing.state_rate import StateKind
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.v1.control_pb2 import ArtifactRef, CoordinatorMessage, Deploy, Hold
from tests.net.secure_ends import run
from tests.swarms.connected import connected_swarm


class Noted(StateBudget):
    """Notes which transfers are urgent."""

    def __init__(self) -> None:
        super().__init__()
        self.measured(1e9)
        self.urgent: list[bool] = []

    def transfer(self, kind: StateKind, *, urgent: bool = False, max_bytes_per_second: float = 0.0) -> PacedTransfer:
        self.urgent.append(urgent)
        return super().transfer(kind, urgent=urgent, max_bytes_per_second=max_bytes_per_second)


def test_the_line_is_as_fast_as_the_fastest_connection_to_another_machine() -> None:
    line = OwnLine(StateBudget())
    line.measured("127.0.0.1", 2e9, 2e9)
    assert line.down_bytes_per_second == 0.0 and "assumed" in line.budget.rate()[1]
    line.measured("192.0.2.1", 1e6, 6e6)
    line.measured("192.0.2.2", 5e6, 3e6)
    assert line.budget.line_bytes_per_second == 6e6 and line.down_bytes_per_second == 5e6
    line.measured("192.0.2.3", 1e30, 1e30)
    assert line.budget.line_bytes_per_second <= 1.25e9, "a provider may say anything"


def test_a_machine_next_to_the_coordinator_tells_nothing_about_its_line_to_the_others() -> None:
    line = OwnLine(StateBudget())
    line.measured("192.168.1.7", 1e8, 1e8)
    assert line.budget.line_bytes_per_second == line.down_bytes_per_second == 1e8, "a swarm on one network"
    line.measured("8.8.4.4", 5e6, 2e6)
    line.measured("::ffff:192.168.1.8", 1e8, 1e8)
    assert line.budget.line_bytes_per_second == 2e6 and line.down_bytes_per_second == 5e6
    line.foreground("192.168.1.7").delivered(10**7, 0.1)
    line.budget.control.delivered(10**7, 0.1)
    assert line.budget.line_bytes_per_second == 2e6
    line.foreground("8.8.4.4").delivered(10**6, 0.1)
    assert line.budget.line_bytes_per_second == 1e7


def test_senders_to_one_receiver_share_its_line() -> None:
    assert receiver_limit(None, 3) == receiver_limit(0.0, 3) == 0.0
    assert receiver_limit(8e6, 1) == 4e6 and receiver_limit(8e6, 4) == 1e6


def test_an_artifact_is_urgent_while_a_cluster_stands_still_for_it_whether_others_train_or_not() -> None:
    async def test() -> None:
        async with connected_swarm() as made:
            swarm = made.swarm
            budget = Noted()
            swarm.line = OwnLine(budget)
            for name in ("stage", "held"):
                swarm.artifacts[name] = Artifact(name, "", 3, lambda offset: iter([b"abc"[offset:]]))
            anna = await made.provider("anna")

            async def fetch(name: str) -> bool:
                assert b"".join([chunk async for chunk in anna.client.fetch(name)]) == b"abc"
                return budget.urgent.pop()

            await made.deploy(anna, 0, 2, "stage")
            hold = Hold(key="k", graph=ArtifactRef(id="held"))
            await swarm.tell("anna", CoordinatorMessage(hold=hold))
            assert await fetch("stage")
            assert not await fetch("held"), "a standby fetches ahead"
            rebuilt = Deploy(deployment="d", stages=2, graph=ArtifactRef(id="graph"), weights=ArtifactRef(id="stage"))
            await swarm.tell("anna", CoordinatorMessage(deploy=rebuilt))
            assert await fetch("stage"), "its cluster waits for weights of the checkpoint"
            swarm.members["anna"].reports = True
            assert not await fetch("stage")

    run(test())


def test_an_artifact_that_a_standby_fetches_is_hurried_once_its_cluster_waits_for_it() -> None:
    async def test() -> None:
        async with connected_swarm() as made:
            swarm = made.swarm
            budget = Noted()
            swarm.line = OwnLine(budget)
            swarm.artifacts["held"] = Artifact("held", "", 50_000, lambda offset: iter([bytes(50_000 - offset)]))
            await made.provider("anna")
            member = swarm.members["anna"]
            member.link.speed = LinkSpeed(0.01, 1e5, 1e5)
            await swarm.tell("anna", CoordinatorMessage(hold=Hold(key="k", weights=ArtifactRef(id="held"))))
            sizes = []
            async for piece in swarm.fetch("anna", "held", 0):
                sizes.append(len(piece))
                if len(sizes) == 1:
                    member.order, member.reports = Deploy(weights=ArtifactRef(id="held")), False
            assert budget.urgent == [False]
            assert len(sizes) == 2 and sizes[0] < 5000, "the rest travels in large pieces"

    run(test())


def test_relayed_state_takes_turns_and_activations_count_as_the_foreground() -> None:
    async def test() -> None:
        async with connected_swarm() as made:
            anna, ben = await made.provider("anna"), await made.provider("ben")
            nodes = frozenset(("anna", "ben"))
            budget = made.swarm.line.budget
            budget.measured(1e6)
            made.swarm.allow_relays({"stages": nodes, "replica": nodes}, {"replica": "replica"})
            for name in ("replica", "stages"):
                ends = await asyncio.gather(anna.client.relay(name), ben.client.relay(name))
                before = budget.rate("round")[0]
                await ends[0].stream.send(bytes([1]) * 100_000)
                assert len(await ends[1].stream.receive() or b"") == 100_000
                assert (budget.rate("round")[0] < before - 10_000) == (name == "stages")
                for end in ends:
                    end.abort()

    run(test())
