"""Providers that are killed, silent or stuck are given up when others wait for them and somebody can take their place;
over real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from ravnest.coordinator.health import lease as leases
from ravnest.coordinator.health.stalls import StallTimeouts
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.v1.control_pb2 import LinkState, ProviderMessage, Report
from ravnest.provider.membership.session import SwarmSession
from tests.coordinator.health.watched import BEAT_SECONDS, beat, watched
from tests.net.slow_line import slow_line
from tests.net.swarm_ends import run
from tests.swarms.connected import connected_swarm, done, join_request


def test_a_killed_provider_is_lost_after_a_second_or_two_where_a_standby_is_ready() -> None:
    async def test() -> None:
        async with watched() as swarm:
            anna, _ = await swarm.provider("anna", replacement="standby"), await swarm.provider("ben")
            killed = time.monotonic()
            await anna.break_off()
            await swarm.until(lambda: "anna" in swarm.lost)
            reason, detect_seconds, at = swarm.lost["anna"]
            assert 0.5 < at - killed < 3.0 and 0.5 < detect_seconds < 3.0
            assert "no connection for" in reason and "a standby is ready" in reason
            assert swarm.kinds("anna") == ["suspected"] and swarm.kinds("ben") == []
            await swarm.connected.until(lambda: bool(swarm.connected.recorded.gone))
            assert not swarm.is_well("anna") and swarm.is_well("ben")

    run(test())


def test_a_killed_provider_that_nobody_listens_for_any_more_is_lost_at_once() -> None:
    class Nothing:
        async def link(self, peer: str, link: Link) -> None:
            raise AssertionError("nobody links here")

    async def test() -> None:
        async with watched() as swarm:
            await swarm.provider("ben")
            node = NodeIdentity.new()
            server = ProviderServer(Nothing(), node)
            address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
            reply = await swarm.connected.ask(swarm.connected.invite(), join_request(node, "anna", address=address))
            node.adopt(reply.certificate, swarm.connected.swarm.admission.authority.certificate)
            client = CoordinatorClient(f"127.0.0.1:{swarm.connected.port}", node.tls_keys(), "anna")
            stay = SwarmSession(client, reply.session)
            connecting = asyncio.create_task(stay.keep_connected())
            swarm.blocking, swarm.replacements = {"anna"}, {"anna": "reform"}
            await swarm.until(lambda: swarm.is_well("anna"))
            await swarm.until(lambda: swarm.connected.swarm.members["anna"].reach is not None)
            killed = time.monotonic()
            connecting.cancel()
            await asyncio.gather(server.stop(0.0), connecting, return_exceptions=True)
            await swarm.until(lambda: "anna" in swarm.lost)
            reason, _, at = swarm.lost["anna"]
            assert at - killed < 2.0, "others could go on without it after 8 s"
            assert "its address refuses connections" in reason
            await client.close()

    run(test())


def test_silence_is_a_loss_where_somebody_can_take_the_place_and_a_wait_where_nobody_can() -> None:
    async def test() -> None:
        async with watched() as swarm:
            await swarm.provider("beats")
            silent = time.monotonic()
            for name, replacement in (("standby", "standby"), ("alone", "none"), ("idle", None)):
                await swarm.provider(name, beats=False, replacement=replacement)  # type: ignore[arg-type]
            await swarm.until(lambda: "standby" in swarm.lost)
            reason, detect_seconds, at = swarm.lost["standby"]
            assert 2.5 < at - silent < 6.0 and 2.5 < detect_seconds < 6.0
            assert "nothing received for" in reason
            await swarm.connected.until(lambda: [node for node, _ in swarm.connected.recorded.gone] == ["standby"])
            assert swarm.lost.keys() == {"standby"}
            await swarm.until(lambda: all(swarm.kinds(name) == ["suspected"] for name in ("alone", "idle")))
            assert swarm.is_well("beats") and not swarm.is_well("alone")
            # Whoever is heard again is well again, and that is told.
            beat(next(p for p in swarm.connected.providers if p.node.node_id == "alone"))
            await swarm.until(lambda: swarm.is_well("alone"))
            assert swarm.kinds("alone") == ["suspected", "reconnected"]

    run(test())


def test_a_provider_that_comes_back_in_time_is_not_lost() -> None:
    async def test() -> None:
        async with watched() as swarm:
            anna, _ = await swarm.provider("anna", replacement="standby"), await swarm.provider("ben")
            for _ in range(3):
                await swarm.connected.break_connections("anna")
                await swarm.connected.until(lambda: bool(swarm.connected.recorded.down))
                await swarm.until(lambda: anna.control.link.connected and anna.feed.connected)
            assert swarm.lost == {}

    run(test())


def test_one_that_was_given_up_is_told_so_and_joins_again_and_what_it_sent_before_counts_for_nothing() -> None:
    async def test() -> None:
        async with watched() as swarm:
            anna = await swarm.provider("anna", beats=False, replacement="standby")
            await swarm.provider("ben")
            await swarm.connected.deploy(anna, 0, 1, generation=1)
            before = swarm.connected.swarm.members["anna"].session
            await swarm.until(lambda: "anna" in swarm.lost)
            for link in (anna.control.link, anna.feed):
                with pytest.raises(RefusedError, match=r"anna was given up: .* it may join again"):
                    while await link.receive() is not None:
                        pass
            late = SwarmSession(anna.client, before)
            with pytest.raises(RefusedError, match="this session of anna is over; join again"):
                await late.keep_connected()
            again = await swarm.connected.provider("anna", anna.node)
            beat(again)
            await swarm.until(lambda: swarm.is_well("anna"))
            # It has a stage again, of a later generation: what it still says of the one before is passed over.
            await swarm.connected.deploy(again, 0, 1, generation=2)
            await again.feed.send(done(7, generation=1))
            await again.feed.send(done(8, generation=2))
            await swarm.connected.until(lambda: swarm.connected.recorded.frames == [("anna", FrameKind.DONE)])
            swarm.connected.swarm.allow_relays({"new": frozenset(("ben", "cid"))})
            connection = await again.client.relay("old")
            with pytest.raises(RefusedError, match="anna is no end of the link 'old'"):
                await connection.receive()
            assert swarm.is_well("anna") and again.feed.connected

    run(test())


def test_a_frame_to_one_that_was_given_up_is_refused_here() -> None:
    async def test() -> None:
        async with watched() as swarm:
            await swarm.provider("anna", beats=False, replacement="standby")
            await swarm.provider("ben")
            await swarm.until(lambda: "anna" in swarm.lost)
            with pytest.raises(PeerError):
                await swarm.connected.swarm.feed_frame("anna", Frame(FrameKind.FEED, 1))

    run(test())


def test_a_watch_that_was_itself_stopped_gives_nobody_up() -> None:
    async def test() -> None:
        async with watched() as swarm:
            names = ("anna", "ben", "cid")
            for name in names:
                await swarm.provider(name, replacement="standby")
            # The whole process, as SIGSTOP and SIGCONT would: everybody was silent for longer than is waited for.
            time.sleep(4.0)
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 1.0)
            assert swarm.lost == {} and swarm.events == []
            assert all(swarm.is_well(name) for name in names)

    run(test())


def test_when_nobody_at_all_is_heard_nobody_is_given_up() -> None:
    """The coordinator's own line is down, then: whoever comes back first is no reason to give up the second."""

    async def test() -> None:
        async with watched() as swarm:
            anna, ben = [await swarm.provider(name, replacement="standby") for name in ("anna", "ben")]
            for provider in (anna, ben):
                await provider.break_off()
            await swarm.until(lambda: swarm.kinds("anna") == swarm.kinds("ben") == ["suspected"])
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 2.0)
            back = asyncio.create_task(anna.session.keep_connected())
            await swarm.until(lambda: swarm.is_well("anna"))
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 2.0)
            assert swarm.lost == {}
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    run(test())


def test_a_jump_of_the_clock_on_the_wall_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with watched() as swarm:
            for name in ("anna", "ben"):
                await swarm.provider(name, replacement="standby")
            real = time.time
            for hours in (24, -24):
                monkeypatch.setattr(time, "time", lambda hours=hours: real() + 3600 * hours)
                since = time.monotonic()
                await swarm.until(lambda since=since: time.monotonic() - since > 0.7)
            assert swarm.lost == {} and swarm.events == []

    run(test())


def a_report(forwards: int, ready: int = 0, **routes: str) -> Report:
    links = [LinkState(node=node, route=route, connections=1) for node, route in routes.items()]
    return Report(deployment="d", forwards=forwards, ready=ready, links=links)


def test_a_stage_that_reports_and_does_nothing_while_work_waits_is_given_up() -> None:
    async def test() -> None:
        async with watched(StallTimeouts(standby_seconds=1.0, first_task_seconds=0.0)) as swarm:
            for name in ("anna", "ben"):
                await swarm.provider(name, replacement="standby")
            swarm.clusters = [("anna", "ben")]
            for forwards in range(3):
                swarm.watch.reported("anna", a_report(forwards, ben="direct"))
                swarm.watch.reported("ben", a_report(forwards, ready=2, anna="direct"))
                await asyncio.sleep(0.1)
            assert swarm.lost == {}
            await swarm.until(lambda: bool(swarm.lost))
            reason, detect_seconds, _ = swarm.lost["ben"]
            assert "the cluster has stood still for" in reason and "ben has had 2 tasks to do for" in reason
            assert 0.9 < detect_seconds < 3.0 and swarm.kinds("ben") == ["suspected"] and swarm.kinds("anna") == []

    run(test())


def a_save(done_bytes: int, total_bytes: int, ready: int = 3) -> Report:
    report = a_report(1, ready=ready)
    report.activity.kind = "save"
    report.transfers.add(kind="checkpoint", name="checkpoint-7", done_bytes=done_bytes, total_bytes=total_bytes)
    return report


def test_a_stage_whose_state_comes_over_a_thin_line_is_at_work_and_one_that_only_says_so_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The state takes three times as long as a stage may stand still, as 63 MB do on a line of 10 Mbit/s.
    still, rate = 1.5, 1e6
    size = int(3 * still * rate)
    timeouts = StallTimeouts(standby_seconds=still, first_task_seconds=0.0)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(0, size, 1 << 16):
            yield bytes(1 << 16)

    async def test() -> None:
        async with watched(timeouts) as swarm, slow_line(swarm.connected.port, rate, 1e8, 0.01) as port:
            taken: list[int] = []

            async def take(node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
                taken.append(sum([len(chunk) async for chunk in chunks]))

            monkeypatch.setattr(swarm.connected.recorded, "uploaded", take)
            anna = await swarm.provider("anna", replacement="standby")
            swarm.connected.swarm.members["anna"].link.speed = LinkSpeed(0.01, rate, rate)
            line = CoordinatorClient(f"127.0.0.1:{port}", anna.node.tls_keys(), "anna")
            swarm.clusters, swarm.awaited_upload = [("anna",)], "checkpoint-7"
            swarm.watch.reported("anna", a_save(0, size))
            began = time.monotonic()
            uploading = asyncio.create_task(line.upload("checkpoint-7", chunks()))
            while not uploading.done():
                swarm.watch.reported("anna", a_save(size // 2, size))
                await asyncio.sleep(0.2)
            assert time.monotonic() - began > 2 * still and taken and taken[0] >= size
            assert swarm.lost == {} and swarm.events == [], "it was at work, and not even suspected"

            # It says that the next one is nearly there, and nothing of it comes.
            began = time.monotonic()
            while not swarm.lost and time.monotonic() - began < 10 * still:
                swarm.watch.reported("anna", a_save(int(0.9 * size), size))
                await asyncio.sleep(0.2)
            reason, _, at = swarm.lost["anna"]
            assert at - began < 4 * still
            assert "anna has been sending its state for" in reason and "and nothing has arrived" in reason
            await line.close()

    run(test())


def test_an_upload_that_no_stage_waits_for_does_not_excuse_one_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with watched(StallTimeouts(standby_seconds=1.0, first_task_seconds=0.0)) as swarm:
            over = asyncio.Event()

            async def chunks() -> AsyncIterator[bytes]:
                while not over.is_set():
                    yield bytes(1 << 16)
                    await asyncio.sleep(0.05)

            async def take(node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
                async for _ in chunks:
                    pass

            monkeypatch.setattr(swarm.connected.recorded, "uploaded", take)
            anna = await swarm.provider("anna", replacement="standby")
            swarm.clusters, swarm.awaited_upload = [("anna",)], "checkpoint-7"
            uploading = asyncio.create_task(anna.client.upload("part-7-0", chunks()))
            member = swarm.connected.swarm.members["anna"]
            await swarm.until(lambda: member.uploads.named("part-7-0") is not None)
            swarm.watch.reported("anna", a_save(1, 2))
            await swarm.until(lambda: bool(swarm.lost))
            assert "the cluster has stood still for" in swarm.lost["anna"][0]
            over.set()
            uploading.cancel()
            await asyncio.gather(uploading, return_exceptions=True)

    run(test())


def test_what_is_uploaded_is_heard_though_nothing_is_said() -> None:
    async def test() -> None:
        async with watched() as swarm:
            over = asyncio.Event()

            async def chunks() -> AsyncIterator[bytes]:
                while not over.is_set():
                    yield bytes(1 << 16)
                    await asyncio.sleep(0.2)

            async def take(node_id: str, name: str, chunks: AsyncIterator[bytes]) -> None:
                async for _ in chunks:
                    pass

            swarm.connected.recorded.uploaded = take  # type: ignore[method-assign]
            anna = await swarm.provider("anna", beats=False, replacement="standby")
            uploading = asyncio.create_task(anna.client.upload("checkpoint-7", chunks()))
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 5.0)
            assert swarm.lost == {}
            uploading.cancel()
            await swarm.until(lambda: "anna" in swarm.lost)
            assert "nothing received for" in swarm.lost["anna"][0]

    run(test())


def test_a_cluster_that_had_nothing_to_do_for_long_has_not_stood_still() -> None:
    async def test() -> None:
        async with watched(StallTimeouts(standby_seconds=2.0, first_task_seconds=0.0)) as swarm:
            await swarm.provider("anna", replacement="standby")
            await swarm.provider("ben")
            swarm.watch.reported("anna", a_report(1, ready=1))
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 2.0)
            swarm.clusters = [("anna",)]
            await swarm.until(lambda: time.monotonic() - since > 2.8)
            assert swarm.lost == {} and swarm.events == []

    run(test())


def test_a_neighbour_s_complaint_shortens_the_wait_for_one_that_is_away() -> None:
    async def test() -> None:
        async with watched() as swarm:
            await swarm.provider("ben")
            anna = await swarm.provider("anna", replacement="reform")
            await anna.break_off()
            swarm.watch.reported("ben", a_report(1, anna=""))
            began = time.monotonic()
            await swarm.until(lambda: "anna" in swarm.lost)
            reason, _, at = swarm.lost["anna"]
            assert at - began < 7.0 and "no connection with ben either" in reason

    run(test())


def test_a_provider_without_a_stage_is_heard_too() -> None:
    async def test() -> None:
        async with connected_swarm() as swarm:
            anna = await swarm.provider("anna")
            beat(anna)
            link = swarm.swarm.members["anna"].control.link
            before = link.last_received_at
            async with asyncio.timeout(5):
                while link.last_received_at < before + 3 * BEAT_SECONDS:
                    await asyncio.sleep(0.02)
            assert swarm.recorded.gone == []
            # And what it says besides still arrives, each once.
            await anna.control.send(ProviderMessage(leaving={"reason": "enough"}))
            await anna.control.link.close()
            await swarm.until(lambda: swarm.recorded.gone == [("anna", "it left: enough")])

    run(test())


def test_a_stage_that_sends_heartbeats_and_no_reports_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(leases.SILENT_SECONDS, "none", 1.0)

    async def test() -> None:
        async with watched() as swarm:
            providers = {name: await swarm.provider(name) for name in ("mute", "failed", "former", "idle")}
            for name in ("mute", "failed", "former"):
                await swarm.connected.deploy(providers[name], 0, 1)
            await providers["mute"].control.send(ProviderMessage(report={"deployment": "d"}))
            # A stage that has failed has nothing to report, and neither has one whose last report was of another run.
            await providers["failed"].control.send(ProviderMessage(report={"deployment": "d"}))
            await providers["failed"].control.send(ProviderMessage(failed={"deployment": "d", "kind": "link"}))
            await providers["former"].control.send(ProviderMessage(report={"deployment": "one before"}))
            await swarm.until(lambda: "mute" in swarm.lost)
            assert "has not reported for" in swarm.lost["mute"][0]
            since = time.monotonic()
            await swarm.until(lambda: time.monotonic() - since > 1.5)
            assert swarm.lost.keys() == {"mute"}
            assert all(swarm.is_well(name) for name in ("failed", "former", "idle"))

    run(test())
