"""A node that has joined abuses the counts of its own links, or the links of others.

It is dropped or refused with a sentence, and the others go on.
"""

import asyncio
import contextlib
import gc
import ssl
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from grpc import aio

from ravnest.coordinator.swarm.members import Member
from ravnest.coordinator.swarm.swarm import SwarmLimits
from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import COORDINATOR_HOST
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import WINDOW_BYTES, ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, ProviderMessage, Stop
from ravnest.provider.membership.session import SwarmSession
from tests.swarms.in_process import Joined, LocalSwarm, RawStream, attacked, raw_stream, refusal, run

MEGABYTE = 1 << 20


def sent(kind: FrameKind, count: int = 0, **changes: object) -> bytes:
    return encode(Frame(kind, count, **changes))  # type: ignore[arg-type]


WITH_VALUES = {"tensors": {"x": torch.zeros(8)}}
DONE = sent(FrameKind.DONE, 1, generation=1)


@pytest.mark.parametrize("method", ["Feed", "Control"])
@pytest.mark.parametrize(
    ("resume", "messages", "words"),
    [
        (0, [sent(FrameKind.ACK, 7)], "mallory confirms 7 frames, 0 to 2 are possible"),
        (0, [sent(FrameKind.ACK, -1)], "mallory confirms -1 frames, 0 to 2 are possible"),
        (0, [sent(FrameKind.ACK, 2), sent(FrameKind.ACK, 1)], "mallory confirms 1 frames, 2 to 2 are possible"),
        (7, [], "mallory confirms 7 frames, 0 to 2 are possible"),
        (-(2**63), [], "mallory confirms -9223372036854775808 frames, 0 to 2 are possible"),
        (0, [sent(FrameKind.RESUME, 0)], "mallory sent its count twice over one connection"),
        (None, [DONE], "mallory did not begin by saying how many frames it has"),
        (None, [sent(FrameKind.ACK, 0)], "mallory did not begin by saying how many frames it has"),
        (0, [sent(FrameKind.ACK, 0, **WITH_VALUES)], "mallory sent a ACK frame that carries values"),
        (0, [sent(FrameKind.END, 0, scalars={"x": 1})], "mallory sent a END frame that carries values"),
        (None, [sent(FrameKind.RESUME, 0, **WITH_VALUES)], "mallory sent a RESUME frame that carries values"),
    ],
    ids=[
        *("confirms what was never sent", "confirms less than nothing", "takes back what it confirmed"),
        *("begins with what was never sent", "begins below nothing", "begins again in the middle"),
        *("begins with a frame", "begins with a confirmation", "hides values in a confirmation"),
        *("hides values in its end", "hides values in its beginning"),
    ],
)
def test_a_peer_that(method: str, resume: int | None, messages: list[bytes], words: str) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await two_frames(swarm, mallory, method)
            call = await raw_stream(swarm, mallory, method, None)
            if resume is not None:
                await call.write(sent(FrameKind.RESUME, resume))
            for message in messages:
                await call.write(message)
            said = await refusal(call)
            assert words in said and said.endswith("the link is given up"), said
            assert words in await swarm.dropped("mallory")
            assert swarm.told.frames == []
            call.cancel()
            # For good: the stay is over, and no connection brings it back.
            with pytest.raises(RefusedError, match="this session of mallory is over; join again"):
                await SwarmSession(mallory.client, mallory.session).keep_connected()
            await swarm.still_works(anna)

    run(test())


async def two_frames(swarm: LocalSwarm, mallory: Joined, method: str) -> None:
    """The coordinator has sent two frames on this link, and the node has not confirmed them."""
    link = its_link(swarm.swarm.members[mallory.id], method)
    # Not to be confirmed by the node's own, honest, end.
    await mallory.break_off()
    await link.until_disconnected()
    for number in range(2):
        if method == "Feed":
            await swarm.swarm.feed_frame(mallory.id, Frame(FrameKind.FEED, number))
        else:
            await swarm.swarm.tell(mallory.id, CoordinatorMessage(stop=Stop(reason=str(number))))
    call = await raw_stream(swarm, mallory, method)
    await until_sent(call, 3)
    call.cancel()
    await link.until_disconnected()


def its_link(member: Member, method: str) -> ResumableLink:
    return member.feed if method == "Feed" else member.control.link


async def until_sent(call: RawStream, frames: int) -> None:
    """Until so many frames have come; small ones may come together in one message."""
    while frames > 0:
        frames -= bytes(await call.read()).count(b"RVN\x01")


def test_going_back_behind_what_an_earlier_connection_confirmed() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await two_frames(swarm, mallory, "Feed")
            first = await raw_stream(swarm, mallory, "Feed", 2)
            await until_sent(first, 1)
            first.cancel()
            second = await raw_stream(swarm, mallory, "Feed", 0)
            assert "mallory confirms 0 frames, 2 to 2 are possible" in await refusal(second)
            assert "mallory confirms 0 frames" in await swarm.dropped("mallory")
            await swarm.still_works(anna)

    run(test())


def test_confirming_what_waits_to_be_sent() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            call = await raw_stream(swarm, mallory, "Feed")
            feed = swarm.swarm.members["mallory"].feed
            await feed.until_connected()
            # It reads none of these, so most of them are still here.
            for number in range(60):
                await swarm.swarm.feed_frame("mallory", a_megabyte(number))
            await call.write(sent(FrameKind.ACK, 60))
            reason = await swarm.dropped("mallory")
            assert "mallory confirms 60 frames, 0 to" in reason, reason
            call.cancel()
            await swarm.still_works(anna)

    run(test())


def a_megabyte(number: int) -> Frame:
    return Frame(FrameKind.FEED, number, tensors={"x": torch.zeros(MEGABYTE, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "after",
    [[], [sent(FrameKind.END)], [DONE], [sent(FrameKind.END), DONE, sent(FrameKind.RESUME), sent(FrameKind.ACK, 9)]],
    ids=["END", "END twice", "a frame after END", "everything after END"],
)
def test_ending_the_feed_and_staying(after: list[bytes]) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy("mallory", 0, 1)
            call = await raw_stream(swarm, mallory, "Feed")
            # In one message: a write of its own may come after the end of the call.
            await call.write(b"".join([sent(FrameKind.END), *after]))
            assert await swarm.dropped("mallory") == "mallory ended its feed in the middle of its session"
            assert swarm.told.frames == []
            call.cancel()
            # Whoever wants to feed it is told, and does not wait for room that never comes.
            with pytest.raises(PeerError):
                await swarm.swarm.feed_frame("mallory", a_megabyte(1))
            await swarm.still_works(anna)

    run(test())


def test_speaking_on_after_the_end_of_control() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            message = torch.frombuffer(
                bytearray(ProviderMessage(ready={"deployment": "x"}).SerializeToString()), dtype=torch.uint8
            )
            call = await raw_stream(swarm, mallory, "Control")
            spoken = sent(FrameKind.CONTROL, tensors={"message": message})
            await call.write(sent(FrameKind.END) + sent(FrameKind.END) + spoken)
            assert await swarm.dropped("mallory") == "it ended its connection"
            assert swarm.told.messages == []
            call.cancel()
            await swarm.still_works(anna)

    run(test())


def test_a_connection_that_never_says_its_count_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.net.streams.link_carrier.RESUME_SECONDS", 0.2)

    async def test() -> None:
        async with attacked(SwarmLimits(reconnect_seconds=0.5)) as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.admit("mallory")
            calls = [await raw_stream(swarm, mallory, method, None) for method in ("Control", "Feed")]
            assert swarm.connected() == ["anna"]
            for call in calls:
                assert "mallory did not say how many frames it has within 0 s" in await refusal(call)
            assert "there has been no connection to mallory" in await swarm.dropped("mallory")
            await swarm.still_works(anna)

    run(test())


def test_many_connections_for_one_link_leave_one_and_disturb_nobody() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            calls = await asyncio.gather(*(raw_stream(swarm, mallory, "Feed", None) for _ in range(50)))
            for call in calls:
                # Those that have been replaced by now cannot be written to.
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(sent(FrameKind.RESUME))
            ended = [asyncio.create_task(refusal(call)) for call in calls]
            while sum(task.done() for task in ended) < 49:
                await asyncio.wait([t for t in ended if not t.done()], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            assert sum(task.done() for task in ended) == 49
            await swarm.still_works(anna)
            for call in calls:
                call.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

    run(test())


def test_a_stage_that_never_reads_is_fed_no_more_than_a_window() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            call = await raw_stream(swarm, mallory, "Feed")
            await swarm.swarm.members["mallory"].feed.until_connected()
            gc.collect()
            before = psutil.Process().memory_info().rss
            fed = 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    for number in range(1000):
                        await swarm.swarm.feed_frame("mallory", a_megabyte(number))
                        fed += 1
            assert fed <= WINDOW_BYTES // MEGABYTE + 1
            # What waits, and copies of it on the way to the network.
            assert psutil.Process().memory_info().rss - before < 2 * WINDOW_BYTES
            # Whoever reads is fed meanwhile, far beyond a window of its own.
            reading = asyncio.create_task(read_all(anna, 150))
            for number in range(150):
                await swarm.swarm.feed_frame("anna", a_megabyte(number))
            assert await reading == list(range(150))
            await swarm.still_works(anna)
            call.cancel()

    run(test())


async def read_all(joined: Joined, count: int) -> list[int]:
    frames = [await joined.feed.receive() for _ in range(count)]
    return [frame.microbatch for frame in frames if frame is not None]


@pytest.mark.parametrize("values", [0, 200], ids=["empty frames", "frames full of numbers"])
def test_a_flood_that_nobody_takes_is_held_back(values: int) -> None:
    """As many as the other side takes in, which are some 130,000 empty frames; a million are offered."""

    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            await swarm.deploy("mallory", 0, 1)
            member = swarm.swarm.members["mallory"]
            # Who would take them is busy with the first for good.
            stuck = asyncio.Event()
            member.feed.receive = stuck.wait  # type: ignore[method-assign, assignment]
            call = await raw_stream(swarm, mallory, "Feed")
            await call.write(DONE)
            await call.write(DONE)
            gc.collect()
            before = psutil.Process().memory_info().rss
            frame = sent(FrameKind.DONE, 1, scalars={f"number-{n}": n for n in range(values)})
            together = frame * (1000 if not values else 10)
            offered = 0
            with pytest.raises(TimeoutError):
                while offered < 1000 * len(together):
                    async with asyncio.timeout(1):
                        await call.write(together)
                    offered += len(together)
            await swarm.still_works(anna)
            assert psutil.Process().memory_info().rss - before < 4 * WINDOW_BYTES
            call.cancel()

    run(test())


def test_dialling_with_the_session_of_another_node() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.join("mallory")
            stolen = [anna.session, "", anna.session[:-1], "x" * 4000]
            for session in stolen:
                for dial in (mallory.client.control, mallory.client.feed):
                    link = await dial(session)
                    with pytest.raises(RefusedError, match="this session of mallory is over; join again"):
                        await link.receive()
            # Neither of them noticed anything, and both are who they were.
            assert swarm.told.down == swarm.told.gone == []
            assert [swarm.swarm.members[n].feed.connections for n in ("anna", "mallory")] == [1, 1]
            await swarm.still_works(anna)
            await swarm.still_works(mallory)

    run(test())


def test_dialling_with_the_session_of_a_stay_that_is_over() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            before = await swarm.join("anna")
            again = await swarm.join("anna", node=before.node)
            assert before.session != again.session
            link = await again.client.feed(before.session)
            with pytest.raises(RefusedError, match="this session of anna is over; join again"):
                await link.receive()
            await swarm.still_works(again)

    run(test())


async def refused_at_the_relay(joined: Joined, link: str, words: str) -> None:
    end = await joined.client.relay(link)
    with pytest.raises(RefusedError, match=words):
        await end.receive()


async def come_and_speak(swarm: LocalSwarm, one: Joined, other: Joined, link: str) -> tuple[Link, Link]:
    """Both ends meet at the relay, and each hears the other."""
    ends = await one.client.relay(link), await other.client.relay(link)
    for near, far in (ends, ends[::-1]):
        await near.send(Frame(FrameKind.RESUME, 5))
        frame = await far.receive()
        assert frame is not None and frame.microbatch == 5
    return ends


def test_having_a_link_relayed_that_is_not_ones_own() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, ben, mallory = [await swarm.join(name) for name in ("anna", "ben", "mallory")]
            swarm.swarm.allow_relays({"d2-0": frozenset(("anna", "ben"))})
            for link in ("d2-0", "", "d2-1", "d1-0", "x" * 4000):
                await refused_at_the_relay(mallory, link, "mallory is no end of the link '.*', so it is not relayed")
            near, far = await come_and_speak(swarm, anna, ben, "d2-0")
            # In the middle as well: it neither hears nor says anything.
            await refused_at_the_relay(mallory, "d2-0", "mallory is no end of the link 'd2-0'")
            await near.send(Frame(FrameKind.ACK, 6))
            frame = await far.receive()
            assert frame is not None and frame.microbatch == 6
            await swarm.still_works(anna)
            for end in (near, far):
                end.abort()

    run(test())


def test_having_a_link_relayed_that_is_of_an_old_deployment() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, ben = [await swarm.join(name) for name in ("anna", "ben")]
            swarm.swarm.allow_relays({"d1-0": frozenset(("anna", "ben"))})
            near, far = await come_and_speak(swarm, anna, ben, "d1-0")
            swarm.swarm.allow_relays({"d2-0": frozenset(("anna", "ben"))})
            for end in (near, far):
                with pytest.raises(RefusedError, match="the deployment of the link 'd1-0' is over"):
                    await end.receive()
            await refused_at_the_relay(anna, "d1-0", "anna is no end of the link 'd1-0'")
            for end in await come_and_speak(swarm, anna, ben, "d2-0"):
                end.abort()

    run(test())


def test_coming_to_the_relay_as_both_ends() -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = [await swarm.join(name) for name in ("anna", "mallory")]
            swarm.swarm.allow_relays({"d1-0": frozenset(("anna", "mallory"))})
            first = await mallory.client.relay("d1-0")
            await first.send(Frame(FrameKind.RESUME, 1))
            second = await mallory.client.relay("d1-0")
            with pytest.raises(PeerError, match="mallory has connected again"):
                await first.receive()
            # It does not hear itself: what comes is of the other end.
            far = await anna.client.relay("d1-0")
            await far.send(Frame(FrameKind.RESUME, 2))
            frame = await second.receive()
            assert frame is not None and frame.microbatch == 2
            for end in (second, far):
                end.abort()
            await swarm.still_works(anna)

    run(test())


@dataclass
class SlowStream:
    """A stream of gRPC made by hand, so that a message can be sent byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, swarm: LocalSwarm, joined: Joined, method: str, folder: Path) -> "SlowStream":
        keys = joined.node.tls_keys()
        for name, pem in (("key", keys.key), ("certificate", keys.certificate), ("root", keys.roots)):
            (folder / name).write_bytes(pem)
        context = ssl.create_default_context(cafile=str(folder / "root"))
        context.load_cert_chain(folder / "certificate", folder / "key")
        context.set_alpn_protocols(["h2"])
        opened = await asyncio.open_connection("127.0.0.1", swarm.port, ssl=context, server_hostname=COORDINATOR_HOST)
        made = cls(*opened)
        headers = {
            ":method": "POST",
            ":scheme": "https",
            ":path": f"/ravnest.v1.Coordinator/{method}",
            ":authority": COORDINATOR_HOST,
            "content-type": "application/grpc",
            "te": "trailers",
            "ravnest-link": joined.session,
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        made.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2(4, 0, 0, b"") + _http2(1, 4, 1, block))
        return made

    async def send(self, data: bytes) -> None:
        self.writer.write(_http2(0, 0, 1, data))
        await self.writer.drain()


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _http2(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def a_message(size: int, data: bytes = b"") -> bytes:
    """The beginning of a message of this size, as gRPC has it."""
    return b"\0" + size.to_bytes(4, "big") + data


def test_endless_slow_bytes_hold_nobody_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with attacked() as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.admit("mallory")
            gc.collect()
            before = psutil.Process().memory_info().rss
            streams = []
            for method in ("Control", "Feed"):
                stream = await SlowStream.open(swarm, mallory, method, tmp_path)
                resume = sent(FrameKind.RESUME)
                await stream.send(a_message(len(resume), resume))
                streams.append(stream)
            await swarm.swarm.members.changes.until(lambda: "mallory" in swarm.connected())
            for stream in streams:
                # Half a gigabyte is announced, and comes a byte at a time.
                await stream.send(a_message(1 << 29))
            for _ in range(200):
                for stream in streams:
                    await stream.send(b"R")
            await swarm.still_works(anna)
            assert psutil.Process().memory_info().rss - before < 20 * MEGABYTE
            swarm.swarm.expel("mallory", "too slow")
            assert "mallory was thrown out of the swarm (too slow)" in await swarm.dropped("mallory")
            for stream in streams:
                said = b""
                while b"mallory was thrown out of the swarm" not in said:
                    said += await stream.reader.read(4096)
                stream.writer.transport.abort()
            await swarm.still_works(anna)

    run(test())


def test_endless_slow_bytes_for_a_count_end_with_the_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ravnest.net.streams.link_carrier.RESUME_SECONDS", 0.3)

    async def test() -> None:
        async with attacked(SwarmLimits(reconnect_seconds=1.0)) as swarm:
            anna, mallory = await swarm.join("anna"), await swarm.admit("mallory")
            stream = await SlowStream.open(swarm, mallory, "Control", tmp_path)
            await stream.send(a_message(64))
            for byte in sent(FrameKind.RESUME)[:-1]:
                await stream.send(bytes([byte]))
            said = b""
            while b"did not say how many frames it has" not in said:
                said += await stream.reader.read(4096)
            assert "there has been no connection to mallory" in await swarm.dropped("mallory")
            stream.writer.transport.abort()
            await swarm.still_works(anna)

    run(test())
