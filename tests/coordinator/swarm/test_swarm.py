"""What a node may fetch and say follows from the stage it was given, and a node that returns takes its own place."""

import asyncio

import pytest

from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.membership_log import announce, watch_for_kicks
from ravnest.coordinator.swarm.swarm import SwarmLimits
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import CoordinatorMessage
from ravnest.provider.membership.session import SwarmSession
from tests.net.swarm_ends import run
from tests.swarms.connected import connected_swarm, done, join_request


def result(microbatch: int) -> Frame:
    return Frame(FrameKind.RESULT, microbatch, generation=1)


def test_the_root_ends_microbatches_and_the_leaf_sends_results() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            root, leaf = await swarm.provider("root"), await swarm.provider("leaf")
            await swarm.deploy(root, 0, 2)
            await swarm.deploy(leaf, 1, 2)
            await root.feed.send(done(1))
            await leaf.feed.send(result(1))
            await swarm.until(lambda: len(swarm.recorded.frames) == 2)
            assert sorted(swarm.recorded.frames) == [("leaf", FrameKind.RESULT), ("root", FrameKind.DONE)]

    run(test())


@pytest.mark.parametrize(
    ("stage", "frame", "words"),
    [
        (1, done(1), "a DONE frame, which is not for stage 1 of 3"),
        (1, result(1), "a RESULT frame, which is not for stage 1 of 3"),
        (0, result(1), "a RESULT frame, which is not for stage 0 of 3"),
        (2, done(1), "a DONE frame, which is not for stage 2 of 3"),
        (0, Frame(FrameKind.FORWARD, 1, generation=1), "a FORWARD frame"),
        (None, done(1), "a DONE frame and holds no stage"),
    ],
)
def test_a_stage_that_speaks_for_another_is_dropped_and_named(stage: int | None, frame: Frame, words: str) -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            liar, other = await swarm.provider("liar"), await swarm.provider("other")
            if stage is not None:
                await swarm.deploy(liar, stage, 3)
            await liar.feed.send(frame)
            await swarm.until(lambda: bool(swarm.recorded.gone))
            assert swarm.recorded.frames == []
            assert [node for node, _ in swarm.recorded.gone] == ["liar"] and words in swarm.recorded.gone[0][1]
            with pytest.raises(PeerError, match=words):
                await liar.feed.receive()
            assert [m.node_id for m in swarm.swarm.members.connected()] == ["other"]
            assert other.feed.connected

    run(test())


def test_a_frame_of_a_run_that_was_given_up_is_passed_over() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            root = await swarm.provider("root")
            await swarm.deploy(root, 1, 2, generation=2)
            await root.feed.send(done(1, generation=1))
            await swarm.deploy(root, 0, 2, generation=3)
            await root.feed.send(done(2, generation=3))
            await swarm.until(lambda: len(swarm.recorded.frames) == 1)
            assert swarm.recorded.gone == []

    run(test())


def test_a_node_fetches_what_its_own_order_names_and_nothing_else() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            swarm.swarm.artifacts = {
                name: Artifact(name, "", 7, lambda offset, name=name: iter([name.encode()[offset:]]))
                for name in ("of-anna", "of-ben")
            }
            await swarm.deploy(anna, 0, 2, "of-anna")
            await swarm.deploy(ben, 1, 2, "of-ben")
            assert [chunk async for chunk in anna.client.fetch("of-anna")] == [b"of-anna"]
            assert [chunk async for chunk in anna.client.fetch("of-anna", 3)] == [b"anna"]
            with pytest.raises(RefusedError, match="'of-anna' has 7 bytes and no byte 8"):
                await anext(anna.client.fetch("of-anna", 8))
            for client, name in ((anna.client, "of-ben"), (ben.client, "of-anna"), (ben.client, "../store.sqlite")):
                with pytest.raises(PeerError, match=f"there is no artifact '{name}' for"):
                    async for _ in client.fetch(name):
                        pass

    run(test())


def test_a_node_that_returns_takes_the_place_of_its_old_self() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            first = await swarm.provider("anna")
            again = await swarm.provider("anna", first.node)
            assert again.node.node_id == "anna" and swarm.swarm.members.node_ids() == ["anna"]
            with pytest.raises(PeerError, match="anna has joined again, over another connection"):
                await first.control.receive()
            await swarm.until(
                lambda: swarm.recorded.gone == [("anna", "anna has joined again, over another connection")]
            )
            await swarm.deploy(again, 0, 1)
            message = await again.control.receive()
            assert message is not None and message.deploy.stages == 1

    run(test())


def test_two_machines_of_one_name_are_two_nodes() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            first, second = await swarm.provider("PC"), await swarm.provider("PC")
            assert (first.node.node_id, second.node.node_id) == ("pc", "pc-2")
            assert len(swarm.swarm.members.connected()) == 2

    run(test())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 99, "version": "9.9"}, "this provider runs Ravnest 9.9 .*; update the older one"),
        ({"graph_format": 99}, "graph format 99"),
        ({"address": "nowhere"}, "is not an address"),
    ],
)
def test_a_provider_that_cannot_take_part_does_not_use_the_invite_up(changes: dict[str, object], words: str) -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            invite, node = swarm.invite(uses=1), NodeIdentity.new()
            with pytest.raises(PeerError, match=words):
                await swarm.ask(invite, join_request(node, **changes))
            assert (await swarm.ask(invite, join_request(node))).node_id == "anna"

    run(test())


def test_a_node_that_has_not_joined_since_the_coordinator_started_is_told_to() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            node = NodeIdentity.new()
            admission = swarm.swarm.admission
            caller = admission.caller(
                {"x509_pem_cert": [joiner_keys(swarm.invite().token, admission.authority.certificate).certificate]},
                ["invite"],
                "Join",
            )
            node.adopt(admission.join(caller, node.request(), "anna").certificate, admission.authority.certificate)
            client = CoordinatorClient(f"127.0.0.1:{swarm.port}", node.tls_keys(), "anna")
            for opening in (client.control, client.feed):
                stream = await opening("of another time")
                with pytest.raises(PeerError, match="anna has not joined this coordinator yet; join again"):
                    await stream.receive()
            await client.close()

    run(test())


def test_a_provider_whose_connection_breaks_comes_back_and_nothing_is_lost() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            root = await swarm.provider("root")
            await swarm.deploy(root, 0, 1)
            for number in range(30):
                await root.feed.send(done(number))
                await swarm.swarm.feed_frame("root", Frame(FrameKind.FEED, number, generation=1))
                if number % 10 == 5:
                    await swarm.break_connections("root")
            got = [await root.feed.receive() for _ in range(30)]
            assert [frame.microbatch for frame in got if frame is not None] == list(range(30))
            await swarm.until(lambda: len(swarm.recorded.frames) == 30 and bool(swarm.recorded.back))
            assert swarm.recorded.gone == [] and "root" in swarm.recorded.down
            message = await root.control.receive()
            assert message is not None and message.HasField("deploy")

    run(test())


def test_the_session_of_a_provider_that_does_not_reconnect_ends() -> None:
    async def test() -> None:
        async with connected_swarm(SwarmLimits(reconnect_seconds=0.3)) as swarm:
            anna = await swarm.provider("anna")
            await anna.break_off()
            await swarm.until(lambda: bool(swarm.recorded.gone))
            assert swarm.recorded.gone == [("anna", "there has been no connection to anna for 0 s")]
            assert swarm.recorded.down
            late = SwarmSession(anna.client, swarm.swarm.members["anna"].session)
            with pytest.raises(RefusedError, match="this session of anna is over; join again"):
                await late.keep_connected()
            with pytest.raises(PeerError):
                await swarm.swarm.feed_frame("anna", Frame(FrameKind.FEED, 1))

    run(test())


def test_a_node_cannot_use_the_stay_of_another() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            thief = SwarmSession(ben.client, swarm.swarm.members["anna"].session)
            with pytest.raises(RefusedError, match="this session of ben is over"):
                await thief.keep_connected()
            assert anna.feed.connected and ben.feed.connected

    run(test())


def test_a_node_that_another_process_kicked_is_disconnected() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            watching = asyncio.create_task(watch_for_kicks(swarm.swarm, poll_seconds=0.02))
            swarm.swarm.admission.tokens.kick("anna", 0.0, "sent nonsense")
            for stream in (anna.control, anna.feed):
                with pytest.raises(RefusedError, match=r"anna was thrown out of the swarm \(sent nonsense\); ask"):
                    await stream.receive()
            await swarm.until(lambda: [node for node, _ in swarm.recorded.gone] == ["anna"])
            assert swarm.swarm.members.node_ids() == ["ben"]
            with pytest.raises(PeerError, match="anna was thrown out of the swarm"):
                await anna.client.control("")
            with pytest.raises(PeerError, match="anna has not joined"):
                await swarm.swarm.tell("anna", CoordinatorMessage())
            assert ben.control.link.error is None and ben.control.link.connected
            watching.cancel()

    run(test())


def test_who_comes_and_goes_is_told_with_how_many_there_are() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            told: list[str] = []
            telling = asyncio.create_task(announce(swarm.swarm, 1, told.append))
            anna = await swarm.provider("anna")
            await swarm.provider("ben")
            await anna.session.leave("signal SIGINT")
            await swarm.until(lambda: bool(swarm.recorded.gone))
            await asyncio.sleep(0)
            assert swarm.recorded.gone == [("anna", "it left: signal SIGINT")]
            assert told == [
                "anna joined with : 1 of 1 providers",
                "ben joined with : 2 providers, 1 needed",
                "anna left: 1 of 1 providers",
            ]
            telling.cancel()

    run(test())
