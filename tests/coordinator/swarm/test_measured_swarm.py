"""What a provider measured reaches the coordinator, which knows it before the provider counts, and in words."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ravnest.coordinator.swarm.link_measurements import describe, figures, hear, link_of, measure_pairs
from ravnest.coordinator.swarm.members import LentMachine, Member
from ravnest.coordinator.swarm.membership_log import announce
from ravnest.coordinator.swarm.reachability import Reach
from ravnest.engine.speed.device_speed import Speed
from ravnest.errors import PeerError
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.pacing.traffic_limit import MIN_RATE
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.v1.control_pb2 import CoordinatorMessage, JoinRequest, Measured, PeerMeasured, ProviderMessage
from ravnest.provider.membership.link_measurements import CoordinatorLink, PeerMeasuring
from ravnest.provider.membership.session import SwarmSession
from tests.net.swarm_ends import run
from tests.swarms.connected import ConnectedSwarm, connected_swarm, join_request


class Nothing:
    async def link(self, peer: str, link: Link) -> None:
        raise AssertionError("nobody links here")


def measured(request: JoinRequest) -> JoinRequest:
    request.device, request.memory_bytes, request.cores = "cpu", 12 << 30, 8
    request.flops_per_second, request.memory_bytes_per_second, request.measures_link = 95e9, 30e9, True
    return request


@asynccontextmanager
async def machine(swarm: ConnectedSwarm, name: str) -> AsyncIterator[None]:
    """A provider that listens, has measured its connection and does what the coordinator asks it to measure."""
    node = NodeIdentity.new()
    server = ProviderServer(Nothing(), node)
    port = await server.start("127.0.0.1", 0)
    async with joined(swarm, node, name, f"127.0.0.1:{port}") as stay:
        await CoordinatorLink(lambda line: None).report(stay.client, stay.control)
        peers = PeerMeasuring(node, stay.control)

        async def obey() -> None:
            while (message := await stay.control.receive()) is not None:
                peers.take(message.measure_peer)

        obeying = asyncio.create_task(obey())
        try:
            await swarm.swarm.members.changes.until(lambda: swarm.swarm.members.is_present(node.node_id))
            yield
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            await peers.close()
    await server.stop(grace_seconds=0)


@asynccontextmanager
async def joined(
    swarm: ConnectedSwarm, node: NodeIdentity, name: str = "anna", address: str = ""
) -> AsyncIterator[SwarmSession]:
    """A provider that has joined and is connected, and has not said yet what it measured."""
    reply = await swarm.ask(swarm.invite(), measured(join_request(node, name, address=address)))
    node.adopt(reply.certificate, swarm.authority)
    client = CoordinatorClient(f"127.0.0.1:{swarm.port}", node.tls_keys(), name)
    stay = SwarmSession(client, reply.session)
    connecting = asyncio.create_task(stay.keep_connected())
    member = swarm.swarm.members[reply.node_id]
    await swarm.swarm.members.changes.until(lambda: bool(member.control.link.connections and member.feed.connections))
    try:
        yield stay
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await client.close()


def test_a_machine_is_told_of_in_words() -> None:
    member = Member("anna", "10.0.0.1:7", LentMachine("cpu", 12 << 30, cores=8, speed=Speed(95e9, 0.0)))
    assert describe(member) == "cpu, 8 cores, 12 GiB, 95 GFLOP/s"
    member.link.speed = LinkSpeed(0.0243, 31e6 / 8, 92e6 / 8)
    assert describe(member) == "cpu, 8 cores, 12 GiB, 95 GFLOP/s, 24 ms, 92/31 Mbit/s"
    gpu = Member("ben", "10.0.0.2:7", LentMachine("cuda:0", 80 << 30, cores=16, speed=Speed(41.3e12, 0.0)))
    gpu.link.error = "it broke"
    assert describe(gpu) == "cuda:0, 80 GiB, 41.3 TFLOP/s, connection not measured"
    assert figures(gpu)["link_error"] == "it broke" and "round_trip_seconds" not in figures(gpu)
    # Of a swarm on one machine there is nothing to tell.
    assert describe(Member("provider-0", "127.0.0.1:7", LentMachine("cpu", 1 << 30))) == "cpu"


def test_a_provider_counts_once_its_connection_is_known_and_is_then_announced() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, joined(swarm, NodeIdentity.new()) as stay:
            told: list[str] = []
            telling = asyncio.create_task(announce(swarm.swarm, 2, told.append))
            member = swarm.swarm.members["anna"]
            assert swarm.swarm.members.connected() == [] and told == []
            figures = Measured(round_trip_seconds=0.024, up_bytes_per_second=4e6, down_bytes_per_second=11.5e6)
            await stay.control.send(ProviderMessage(measured=figures))
            await swarm.swarm.members.changes.until(lambda: member.present)
            await asyncio.sleep(0)
            assert told == ["anna joined with cpu, 8 cores, 12 GiB, 95 GFLOP/s, 24 ms, 92/32 Mbit/s: 1 of 2 providers"]
            telling.cancel()

    run(test())


def test_a_provider_that_comes_back_tells_what_it_knows_without_measuring() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, joined(swarm, NodeIdentity.new()) as stay:
            known, lines = LinkSpeed(0.5, 1e4, 2e4), list[str]()
            measured = iter([known])

            async def measure() -> LinkSpeed:
                return next(measured)

            client: Any = SimpleNamespace(measure=measure)
            link = CoordinatorLink(lines.append)
            for _ in range(2):
                await link.report(client, stay.control)
            assert lines == ["connection to the coordinator: 500 ms, 0.16 Mbit/s down, 0.08 Mbit/s up"]
            member = swarm.swarm.members["anna"]
            await swarm.swarm.members.changes.until(lambda: member.link.speed is not None)
            assert member.link.speed == known

    run(test())


def test_a_provider_that_cannot_measure_takes_part_all_the_same() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, joined(swarm, NodeIdentity.new()) as stay:
            await stay.control.send(ProviderMessage(measured=Measured(error="too slow\x1b[2J")))
            member = swarm.swarm.members["anna"]
            await swarm.swarm.members.changes.until(lambda: member.present)
            assert (member.link.speed, member.link.error) == (None, "too slow [2J")

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        Measured(),
        Measured(round_trip_seconds=1, up_bytes_per_second=1, down_bytes_per_second=1, error="but"),
        Measured(round_trip_seconds=float("nan"), up_bytes_per_second=1, down_bytes_per_second=1),
        Measured(round_trip_seconds=1, up_bytes_per_second=-1, down_bytes_per_second=1),
        PeerMeasured(round_trip_seconds=1, up_bytes_per_second=float("inf"), down_bytes_per_second=1),
    ],
)
def test_figures_that_cannot_be_are_none(answer: Measured | PeerMeasured) -> None:
    assert link_of(answer) is None


def test_a_line_is_never_slower_than_the_smallest_limit() -> None:
    answer = Measured(round_trip_seconds=0.1, up_bytes_per_second=1e-6, down_bytes_per_second=1.0)
    assert link_of(answer) == LinkSpeed(0.1, MIN_RATE, MIN_RATE)


@pytest.mark.parametrize(
    "first",
    [Measured(round_trip_seconds=0.1, up_bytes_per_second=1e6, down_bytes_per_second=1e6), Measured(error="no")],
)
def test_a_second_measurement_of_a_session_does_not_count(first: Measured) -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, joined(swarm, NodeIdentity.new()):
            member, members = swarm.swarm.members["anna"], swarm.swarm.members
            second = Measured(round_trip_seconds=9.0, up_bytes_per_second=2e4, down_bytes_per_second=2e4)
            assert hear(members, member, ProviderMessage(measured=first))
            before = (member.link.speed, member.link.error)
            assert hear(members, member, ProviderMessage(measured=second))
            assert (member.link.speed, member.link.error) == before != (None, "")

    run(test())


def test_providers_measure_the_way_to_one_another_when_asked() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, machine(swarm, "anna"), machine(swarm, "ben"), machine(swarm, "cid"):
            assert all(m.link.speed is not None for m in swarm.swarm.members.connected())
            pairs = [("anna", "ben"), ("ben", "anna"), ("ben", "cid"), ("anna", "anna"), ("anna", "nobody")]
            found = await measure_pairs(swarm.swarm, pairs)
            assert set(found) == {("anna", "ben"), ("ben", "anna"), ("ben", "cid")}
            for speed in found.values():
                assert isinstance(speed, LinkSpeed), speed
                assert 0 < speed.round_trip_seconds < 1 and speed.up_bytes_per_second > 1e6

    run(test())


def test_a_pair_that_cannot_be_measured_has_its_reason_and_the_others_their_figures() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, machine(swarm, "anna"), machine(swarm, "ben"):
            ben = swarm.swarm.members["ben"]
            await swarm.swarm.reaches([ben])
            # Nobody listens there any more.
            ben.reach = Reach("127.0.0.1:1", "ben answers at 127.0.0.1:1")
            found = await measure_pairs(swarm.swarm, [("anna", "ben"), ("ben", "anna")])
            error = found["anna", "ben"]
            assert isinstance(error, PeerError) and "cannot reach ben at 127.0.0.1:1" in str(error)
            assert isinstance(found["ben", "anna"], LinkSpeed)
            ben.reach = Reach("", "ben dials out only")
            assert str((await measure_pairs(swarm.swarm, [("anna", "ben")]))["anna", "ben"]) == "ben dials out only"

    run(test())


def test_one_that_leaves_or_is_silent_holds_nobody_up_for_long() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, machine(swarm, "anna"):
            silent = await swarm.provider("silent")
            swarm.swarm.members["silent"].link.is_expected = True
            swarm.swarm.members["silent"].link.speed = LinkSpeed(1, 1, 1)
            found = await measure_pairs(swarm.swarm, [("silent", "anna")], timeout_seconds=0.05)
            assert "silent did not measure the connection to anna within 0.05 seconds" in str(found["silent", "anna"])
            asking = asyncio.create_task(measure_pairs(swarm.swarm, [("silent", "anna")]))
            message = await silent.control.receive()
            while message is not None and not message.HasField("measure_peer"):
                message = await silent.control.receive()
            await silent.session.leave("tired of this")
            assert "silent left before it had measured" in str((await asking)["silent", "anna"])

    run(test())


def test_an_answer_that_nobody_asked_for_is_not_kept() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna = await swarm.provider("anna")
            for number in range(10):
                await anna.control.send(ProviderMessage(peer_measured=PeerMeasured(node=f"node-{number}", error="x")))
            await anna.session.leave("the test is over")
            await swarm.until(lambda: bool(swarm.recorded.gone))
            pairs = swarm.swarm.members.pairs
            assert not any(pairs.has(("anna", f"node-{number}")) for number in range(10))

    run(test())


def test_in_the_embedded_swarm_nothing_is_measured() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            await swarm.provider("provider-0")
            await swarm.provider("provider-1")
            assert await measure_pairs(swarm.swarm, [("provider-0", "provider-1")]) == {}

    run(test())


def test_the_coordinator_cannot_make_a_provider_measure_without_end() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna = await swarm.provider("anna")
            peers = PeerMeasuring(anna.node, anna.control)
            order = CoordinatorMessage().measure_peer
            with pytest.raises(PeerError, match="wants more than 1000 connections measured at once"):
                for _ in range(1001):
                    peers.take(order)
            await peers.close()

    run(test())


def test_a_provider_that_is_still_measuring_is_told_when_the_coordinator_stops() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm, joined(swarm, NodeIdentity.new()) as stay:
            stopping = asyncio.create_task(swarm.swarm.stop("the run has stopped"))
            message = await stay.control.receive()
            assert message is not None and message.stop.reason == "the run has stopped"
            await stopping

    run(test())
