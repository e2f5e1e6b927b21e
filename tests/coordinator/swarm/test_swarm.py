"""What a node may fetch and say follows from the stage it was given, and a node that returns takes its own place."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from ravnest import __version__
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.coordinator.swarm.changes import Changes
from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.membership_log import announce, watch_for_kicks
from ravnest.coordinator.swarm.swarm import Swarm, silence_seconds
from ravnest.errors import PeerError, RefusedError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import ArtifactRef, CoordinatorMessage, Deploy, JoinReply, JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.membership.session import SwarmSession
from tests.net.swarm_ends import run


def about(node: NodeIdentity, name: str = "anna", **changes: object) -> JoinRequest:
    request = JoinRequest(
        certificate_request=node.request(),
        name=name,
        address="127.0.0.1:7701",
        version=__version__,
        protocol=PROTOCOL_VERSION,
        graph_format=FORMAT_VERSION,
    )
    for field, value in changes.items():
        setattr(request, field, value)
    return request


class Told:
    """Who is told what happens in the swarm, and remembers it."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, FrameKind]] = []
        self.gone: list[tuple[str, str]] = []
        self.down: list[str] = []
        self.back: list[str] = []
        self.changes = Changes()

    def joined(self, member: Member) -> None:
        pass

    def said(self, node_id: str, message: ProviderMessage) -> None:
        pass

    def returned(self, node_id: str, frame: Frame) -> None:
        self.frames.append((node_id, frame.kind))
        self.changes.notify()

    def disconnected(self, node_id: str, reason: str) -> None:
        self.down.append(node_id)
        self.changes.notify()

    def reconnected(self, node_id: str) -> None:
        self.back.append(node_id)
        self.changes.notify()

    def vanished(self, node_id: str, reason: str) -> None:
        self.gone.append((node_id, reason))
        self.changes.notify()

    def turned_away(self, address: str, connections: int, reason: str) -> None:
        raise AssertionError("nobody is turned away here")

    async def uploaded(self, node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        raise AssertionError("nothing is uploaded here")


@dataclasses.dataclass
class Provider:
    """A provider in this process."""

    node: NodeIdentity
    client: CoordinatorClient
    stay: SwarmSession
    connecting: asyncio.Task[None]

    @property
    def control(self) -> ControlLink[ProviderMessage, CoordinatorMessage]:
        return self.stay.control

    @property
    def feed(self) -> ResumableLink:
        return self.stay.feed

    async def break_off(self) -> None:
        """As a process that is killed."""
        self.connecting.cancel()
        await asyncio.gather(self.connecting, return_exceptions=True)


class Ends:
    def __init__(self) -> None:
        self.swarm = Swarm(Admission.in_memory())
        self.told = Told()
        self.swarm.events = self.told
        self.port = 0
        self._clients: list[CoordinatorClient] = []
        self._providers: list[Provider] = []

    def invite(self, uses: int = 9) -> SwarmInvite:
        return self.swarm.admission.invite("127.0.0.1", self.port, uses=uses)

    async def ask(self, invite: SwarmInvite, request: JoinRequest) -> JoinReply:
        client = self._client(CoordinatorClient(invite.address, joiner_keys(invite.token, self._authority), "this"))
        return await client.join(request)

    async def provider(self, name: str, node: NodeIdentity | None = None) -> Provider:
        """Joined and connected."""
        node = node or NodeIdentity.new()
        reply = await self.ask(self.invite(), about(node, name))
        node.adopt(reply.certificate, self._authority)
        client = self._client(CoordinatorClient(f"127.0.0.1:{self.port}", node.tls_keys(), name))
        stay = SwarmSession(client, reply.session)
        provider = Provider(node, client, stay, asyncio.create_task(stay.keep_connected()))
        self._providers.append(provider)
        await self.swarm.members.changes.until(
            lambda: any(m.node_id == node.node_id for m in self.swarm.members.connected())
        )
        return provider

    async def deploy(
        self, provider: Provider, stage: int, stages: int, artifact: str = "", generation: int = 1
    ) -> None:
        order = Deploy(
            deployment="d", stage=stage, stages=stages, generation=generation, graph=ArtifactRef(id=artifact)
        )
        await self.swarm.tell(provider.node.node_id, CoordinatorMessage(deploy=order))

    def break_connections(self, node_id: str) -> None:
        """As a router does that forgets them: both ends notice, neither has said anything."""
        for streams in self.swarm._server._ends.get(node_id, ()):
            streams.fail(PeerError("the connection was reset"))

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.told.changes.until(condition)

    async def close(self) -> None:
        for provider in self._providers:
            await provider.break_off()
        for client in self._clients:
            await client.close()
        # A coordinator gives its members a second to go; these are gone, and would not say so.
        for node_id in self.swarm.members.node_ids():
            self.swarm.members.remove(node_id, "the test is over")
        await self.swarm.stop("the test is over")

    def _client(self, client: CoordinatorClient) -> CoordinatorClient:
        self._clients.append(client)
        return client

    @property
    def _authority(self) -> Certificate:
        return self.swarm.admission.authority.certificate


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    made.port = await made.swarm.start()
    try:
        yield made
    finally:
        await made.close()


def done(microbatch: int, generation: int = 1) -> Frame:
    return Frame(FrameKind.DONE, microbatch, generation=generation)


def result(microbatch: int) -> Frame:
    return Frame(FrameKind.RESULT, microbatch, generation=1)


def test_the_root_ends_microbatches_and_the_leaf_sends_results() -> None:
    async def test() -> None:
        async with ends() as swarm:
            root, leaf = await swarm.provider("root"), await swarm.provider("leaf")
            await swarm.deploy(root, 0, 2)
            await swarm.deploy(leaf, 1, 2)
            await root.feed.send(done(1))
            await leaf.feed.send(result(1))
            await swarm.until(lambda: len(swarm.told.frames) == 2)
            assert sorted(swarm.told.frames) == [("leaf", FrameKind.RESULT), ("root", FrameKind.DONE)]

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
        async with ends() as swarm:
            liar, other = await swarm.provider("liar"), await swarm.provider("other")
            if stage is not None:
                await swarm.deploy(liar, stage, 3)
            await liar.feed.send(frame)
            await swarm.until(lambda: bool(swarm.told.gone))
            assert swarm.told.frames == []
            assert [node for node, _ in swarm.told.gone] == ["liar"] and words in swarm.told.gone[0][1]
            with pytest.raises(PeerError, match=words):
                await liar.feed.receive()
            assert [m.node_id for m in swarm.swarm.members.connected()] == ["other"]
            assert other.feed.connected

    run(test())


def test_a_frame_of_a_run_that_was_given_up_is_passed_over() -> None:
    async def test() -> None:
        async with ends() as swarm:
            root = await swarm.provider("root")
            await swarm.deploy(root, 1, 2, generation=2)
            await root.feed.send(done(1, generation=1))
            await swarm.deploy(root, 0, 2, generation=3)
            await root.feed.send(done(2, generation=3))
            await swarm.until(lambda: len(swarm.told.frames) == 1)
            assert swarm.told.gone == []

    run(test())


def test_a_node_fetches_what_its_own_order_names_and_nothing_else() -> None:
    async def test() -> None:
        async with ends() as swarm:
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
        async with ends() as swarm:
            first = await swarm.provider("anna")
            again = await swarm.provider("anna", first.node)
            assert again.node.node_id == "anna" and swarm.swarm.members.node_ids() == ["anna"]
            with pytest.raises(PeerError, match="anna has joined again, over another connection"):
                await first.control.receive()
            await swarm.until(lambda: swarm.told.gone == [("anna", "anna has joined again, over another connection")])
            await swarm.deploy(again, 0, 1)
            message = await again.control.receive()
            assert message is not None and message.deploy.stages == 1

    run(test())


def test_two_machines_of_one_name_are_two_nodes() -> None:
    async def test() -> None:
        async with ends() as swarm:
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
        async with ends() as swarm:
            invite, node = swarm.invite(uses=1), NodeIdentity.new()
            with pytest.raises(PeerError, match=words):
                await swarm.ask(invite, about(node, **changes))
            assert (await swarm.ask(invite, about(node))).node_id == "anna"

    run(test())


def test_a_node_that_has_not_joined_since_the_coordinator_started_is_told_to() -> None:
    async def test() -> None:
        async with ends() as swarm:
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
        async with ends() as swarm:
            root = await swarm.provider("root")
            await swarm.deploy(root, 0, 1)
            for number in range(30):
                await root.feed.send(done(number))
                await swarm.swarm.feed_frame("root", Frame(FrameKind.FEED, number, generation=1))
                if number % 10 == 5:
                    swarm.break_connections("root")
            got = [await root.feed.receive() for _ in range(30)]
            assert [frame.microbatch for frame in got if frame is not None] == list(range(30))
            await swarm.until(lambda: len(swarm.told.frames) == 30 and bool(swarm.told.back))
            assert swarm.told.gone == [] and "root" in swarm.told.down
            message = await root.control.receive()
            assert message is not None and message.HasField("deploy")

    run(test())


def test_a_provider_that_stays_away_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.coordinator.swarm.swarm.PATIENCE_SECONDS", 0.3)

    async def test() -> None:
        async with ends() as swarm:
            anna = await swarm.provider("anna")
            await anna.break_off()
            await swarm.until(lambda: bool(swarm.told.gone))
            assert swarm.told.gone == [("anna", "there has been no connection to anna for 0 s")]
            assert swarm.told.down
            late = SwarmSession(anna.client, swarm.swarm.members["anna"].session)
            with pytest.raises(RefusedError, match="this stay of anna in the swarm is over; join again"):
                await late.keep_connected()
            with pytest.raises(PeerError):
                await swarm.swarm.feed_frame("anna", Frame(FrameKind.FEED, 1))

    run(test())


def test_a_stage_that_is_connected_and_silent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.coordinator.swarm.swarm.SILENCE_SECONDS", 0.3)

    async def test() -> None:
        async with ends() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            await swarm.deploy(anna, 0, 1)
            await anna.control.send(ProviderMessage(report={"deployment": "d"}))
            await swarm.until(lambda: bool(swarm.told.gone))
            assert swarm.told.gone == [("anna", "anna is connected and has said nothing for 0 s")]
            with pytest.raises(RefusedError, match="has said nothing"):
                await anna.feed.receive()
            # One that holds no stage has nothing to say.
            assert ben.control.link.connected and [m.node_id for m in swarm.swarm.members.connected()] == ["ben"]

    run(test())


def test_a_stage_that_has_failed_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a run before, in a swarm that serves several: its neighbours hold other stages now, and it does not."""
    monkeypatch.setattr("ravnest.coordinator.swarm.swarm.SILENCE_SECONDS", 0.3)

    async def test() -> None:
        async with ends() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            await swarm.deploy(anna, 0, 1)
            await swarm.deploy(ben, 0, 1)
            # One has failed; the other was given a new stage while a last word on the old one was under way.
            await anna.control.send(ProviderMessage(report={"deployment": "d"}))
            await anna.control.send(ProviderMessage(failed={"deployment": "d", "kind": "link", "message": "gone"}))
            await ben.control.send(ProviderMessage(report={"deployment": "one before"}))
            await asyncio.sleep(1.0)
            assert swarm.told.gone == []

    run(test())


def test_over_a_slow_line_silence_is_borne_for_longer() -> None:
    fast, slow = (LinkSpeed(0.05, rate, rate) for rate in (100e6, 50e3))
    assert silence_seconds(None) == 60
    assert 60 < silence_seconds(fast) < 61
    assert silence_seconds(slow) > 300


def test_a_node_cannot_use_the_stay_of_another() -> None:
    async def test() -> None:
        async with ends() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            thief = SwarmSession(ben.client, swarm.swarm.members["anna"].session)
            with pytest.raises(RefusedError, match="this stay of ben in the swarm is over"):
                await thief.keep_connected()
            assert anna.feed.connected and ben.feed.connected

    run(test())


def test_a_node_that_was_thrown_out_elsewhere_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.coordinator.swarm.membership_log._LOOK_SECONDS", 0.02)

    async def test() -> None:
        async with ends() as swarm:
            anna, ben = await swarm.provider("anna"), await swarm.provider("ben")
            watching = asyncio.create_task(watch_for_kicks(swarm.swarm))
            swarm.swarm.admission.tokens.kick("anna", 0.0, "sent nonsense")
            for stream in (anna.control, anna.feed):
                with pytest.raises(RefusedError, match=r"anna was thrown out of the swarm \(sent nonsense\); ask"):
                    await stream.receive()
            await swarm.until(lambda: [node for node, _ in swarm.told.gone] == ["anna"])
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
        async with ends() as swarm:
            told: list[str] = []
            telling = asyncio.create_task(announce(swarm.swarm, 1, told.append))
            anna = await swarm.provider("anna")
            await swarm.provider("ben")
            await anna.stay.leave("signal SIGINT")
            await swarm.until(lambda: bool(swarm.told.gone))
            await asyncio.sleep(0)
            assert swarm.told.gone == [("anna", "it left: signal SIGINT")]
            assert told == [
                "anna joined with : 1 of 1 providers",
                "ben joined with : 2 providers, 1 needed",
                "anna left: 1 of 1 providers",
            ]
            telling.cancel()

    run(test())
