"""A link delivers frames in order, makes a fast sender wait, and never hangs whichever way it ends."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError, RefusedError
from ravnest.microbatch import Marks
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import node_host
from ravnest.net.identity.node_identity import joiner_keys
from ravnest.net.identity.private_files import write_private
from ravnest.net.identity.tls import channel_credentials, expecting, open_secure_channel
from ravnest.net.rpc.client import dial_link
from ravnest.net.streams.frame_stream import Link
from tests.net.swarm_ends import BEFORE, CALLED, OTHER, SWARM, a_node, echo, linked, provider, run


def forward(microbatch: int, elements: int = 4) -> Frame:
    return Frame(
        FrameKind.FORWARD, microbatch, marks=Marks(samples=4), tensors={"x": torch.full((elements,), float(microbatch))}
    )


def test_frames_arrive_in_order_both_ways() -> None:
    async def test() -> None:
        async with linked(echo) as (_, link):

            async def send_all() -> None:
                for microbatch in range(500):
                    await link.send(forward(microbatch, 1 + microbatch % 7 * 1000))
                await link.close()

            sending = asyncio.create_task(send_all())
            came = 0
            while (frame := await link.receive()) is not None:
                assert frame.microbatch == came
                assert frame.tensors["x"][-1] == came
                came += 1
            await sending
            assert came == 500
            assert link.bytes_received == link.bytes_sent > 500 * 64

    run(test())


def test_a_frame_of_64_megabytes_arrives_whole() -> None:
    async def test() -> None:
        async with linked(echo) as (_, link):
            big = torch.arange(16 << 20, dtype=torch.int32)
            await link.send(Frame(FrameKind.BACKWARD, 1, tensors={"big": big}))
            frame = await link.receive()
            assert frame is not None
            assert torch.equal(frame.tensors["big"], big)

    run(test())


def test_the_caller_ends_in_order_and_still_receives_what_comes_after() -> None:
    async def test() -> None:
        async def answer_at_the_end(link: Link) -> None:
            count = 0
            while await link.receive() is not None:
                count += 1
            await link.send(Frame(FrameKind.DONE, count))

        async with linked(answer_at_the_end) as (handler, link):
            for microbatch in range(3):
                await link.send(forward(microbatch))
            await link.close()
            await link.close()
            last = await link.receive()
            assert last is not None
            assert last.microbatch == 3
            assert await link.receive() is None
            assert await link.receive() is None
            assert handler.errors == []
            with pytest.raises(PeerError, match=r"ended|closed"):
                await link.send(forward(9))

    run(test())


def test_the_called_side_ends_in_order_by_closing_or_returning() -> None:
    async def test() -> None:
        async def greet(link: Link) -> None:
            await link.send(forward(1))

        async def greet_and_close(link: Link) -> None:
            await link.send(forward(1))
            await link.close()
            assert await link.receive() is None
            with pytest.raises(PeerError, match="closed"):
                await link.send(forward(2))

        for serve in (greet, greet_and_close):
            async with linked(serve) as (handler, link):
                assert await link.receive() is not None
                assert await link.receive() is None
                with pytest.raises(PeerError, match="ended the stream"):
                    await link.send(forward(2))
                await link.close()
                await handler.over.wait()
                assert handler.errors == []

    run(test())


def test_closing_from_another_task_wakes_the_called_sides_receive() -> None:
    async def test() -> None:
        async def close_from_outside(link: Link) -> None:
            closing = asyncio.create_task(link.close())
            assert await link.receive() is None
            await closing

        async with linked(close_from_outside) as (handler, link):
            assert await link.receive() is None
            await handler.over.wait()
            assert handler.errors == []

    run(test())


def test_a_slow_receiver_makes_the_sender_wait() -> None:
    async def test() -> None:
        read_on = asyncio.Event()

        async def slow(link: Link) -> None:
            await read_on.wait()
            while await link.receive() is not None:
                pass

        async with linked(slow) as (_, link):
            sent = 0
            stuck = asyncio.Event()
            frame = forward(1, 1 << 18)

            async def send_all() -> None:
                nonlocal sent
                for _ in range(100):
                    await link.send(frame)
                    sent += 1

            sending = asyncio.create_task(send_all())
            # The sender is stuck when a whole second of the loop's time moves nothing.
            before = -1
            while before != sent:
                before = sent
                try:
                    async with asyncio.timeout(0.5):
                        await stuck.wait()
                except TimeoutError:
                    pass
            assert 0 < sent <= 48, f"{sent} MiB were taken for a peer that reads nothing"
            read_on.set()
            await sending
            await link.close()
            assert await link.receive() is None
            assert link.bytes_sent >= 100 << 20

    run(test())


def test_cancelling_a_receive_or_a_waiting_send_does_not_harm_the_link() -> None:
    async def test() -> None:
        read_on = asyncio.Event()

        async def gated_echo(link: Link) -> None:
            await read_on.wait()
            await echo(link)

        async with linked(gated_echo) as (_, link):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await link.receive()
            sent = 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    while True:
                        await link.send(forward(sent, 1 << 18))
                        sent += 1
            assert sent > 0
            read_on.set()
            for microbatch in range(sent):
                frame = await link.receive()
                assert frame is not None
                assert frame.microbatch == microbatch
            closing = asyncio.create_task(link.close())
            assert await link.receive() is None
            await closing

    run(test())


def test_a_caller_that_aborts_gives_the_called_side_a_peer_error() -> None:
    async def test() -> None:
        async with linked(echo) as (handler, link):
            await link.send(forward(1))
            assert await link.receive() is not None
            link.abort()
            await handler.over.wait()
            assert [type(error) for error in handler.errors] == [PeerError]
            with pytest.raises(PeerError, match="closed on this side"):
                await link.receive()
            with pytest.raises(PeerError, match="closed on this side"):
                await link.send(forward(2))

    run(test())


def test_cancelling_the_callers_task_ends_the_stream_at_the_other_side() -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            linked_up = asyncio.Event()

            async def use_link() -> None:
                link = await dial_link(address, CALLED.node_id, BEFORE)
                try:
                    # Its answer shows that the other side is there: a call that is cancelled sooner may never reach it.
                    await link.send(forward(1))
                    await link.receive()
                    linked_up.set()
                    await link.receive()
                finally:
                    link.abort()

            using = asyncio.create_task(use_link())
            await linked_up.wait()
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            await handler.over.wait()
            assert [type(error) for error in handler.errors] == [PeerError]

    run(test())


def test_a_handler_that_is_cancelled_or_fails_breaks_the_callers_link() -> None:
    async def test() -> None:
        async def cancelled(link: Link) -> None:
            raise asyncio.CancelledError

        async def failing(link: Link) -> None:
            raise PeerError("stage 3 is not ready; wait for Start")

        async def crashing(link: Link) -> None:
            raise KeyError("private detail")

        for serve, words in (
            (cancelled, "stopping"),
            (failing, "^stage 3 is not ready; wait"),
            (crashing, "KeyError"),
        ):
            async with linked(serve) as (_, link):
                with pytest.raises(PeerError, match=words) as caught:
                    await link.receive()
                assert "private detail" not in str(caught.value)
                with pytest.raises(PeerError):
                    await link.send(forward(1))

    run(test())


def test_a_server_that_stops_breaks_its_links_on_both_sides() -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            link = await dial_link(address, CALLED.node_id, BEFORE)
            await link.send(forward(1))
            await link.receive()
        assert len(handler.errors) == 1
        with pytest.raises(PeerError):
            await link.receive()
        await link.stream.finished()

    run(test())


CALLER = """
import asyncio, os, pathlib, sys
from ravnest.net.rpc.client import dial_link
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.certificates import read_certificate

async def main():
    folder = pathlib.Path(sys.argv[2])
    node = NodeIdentity.open(folder, read_certificate((folder / "authority").read_bytes()))
    link = await dial_link(sys.argv[1], "called", node)
    await link.send(Frame(FrameKind.FORWARD, 1))
    await link.receive()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_a_caller_killed_in_mid_stream_is_noticed(tmp_path: Path) -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            write_private(tmp_path / "node.key", BEFORE.tls_keys().key)
            write_private(tmp_path / "node.pem", BEFORE.tls_keys().certificate)
            write_private(tmp_path / "authority", BEFORE.tls_keys().roots)
            command = [sys.executable, "-c", CALLER, address, str(tmp_path)]
            died = await asyncio.to_thread(subprocess.run, command, check=False)
            assert died.returncode == -9
            await handler.over.wait()
            assert [type(error) for error in handler.errors] == [PeerError]
            assert "before" in str(handler.errors[0])

    run(test())


CALLED_SIDE = """
import asyncio, os, pathlib, sys
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.identity.certificates import read_certificate

class Dying:
    async def link(self, peer, link):
        await link.receive()
        os.kill(os.getpid(), 9)

async def main():
    folder = pathlib.Path(sys.argv[1])
    node = NodeIdentity.open(folder, read_certificate((folder / "authority").read_bytes()))
    server = ProviderServer(Dying(), node)
    server.neighbours = {"before"}
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_called_side_killed_in_mid_stream_is_noticed(tmp_path: Path) -> None:
    async def test() -> None:
        write_private(tmp_path / "node.key", CALLED.tls_keys().key)
        write_private(tmp_path / "node.pem", CALLED.tls_keys().certificate)
        write_private(tmp_path / "authority", CALLED.tls_keys().roots)
        command = [sys.executable, "-c", CALLED_SIDE, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            link = await dial_link(f"127.0.0.1:{port}", CALLED.node_id, BEFORE)
            await link.send(forward(1))
            with pytest.raises(PeerError, match=f"127.0.0.1:{port}"):
                await link.receive()
            with pytest.raises(PeerError):
                await link.send(forward(2))
            await link.close()
        finally:
            process.kill()
            process.communicate()

    run(test())


@pytest.mark.parametrize(
    "message",
    [b"not a frame", b"\x80\x04\x95" * 30, encode(Frame(FrameKind.DONE, 1))[:-1], b"RVN\x01" + b"\xff" * 60],
)
def test_a_bad_frame_costs_its_sender_the_connection(message: bytes) -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address), channel_of_before(address) as channel:
            call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/ravnest.v1.Provider/Link")()
            await call.write(message)
            with pytest.raises(aio.AioRpcError, match="bad frame"):
                await call.read()
            await handler.over.wait()
            assert [type(error) for error in handler.errors] == [RefusedError]

    run(test())


def test_a_bad_frame_ends_the_call_even_when_the_handler_goes_on() -> None:
    async def test() -> None:
        over = asyncio.Event()

        async def stubborn(link: Link) -> None:
            with pytest.raises(PeerError, match="bad frame"):
                await link.receive()
            await over.wait()

        async with provider(stubborn) as (handler, address), channel_of_before(address) as channel:
            call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/ravnest.v1.Provider/Link")()
            await call.write(b"bad")
            with pytest.raises(aio.AioRpcError, match="bad frame"):
                await call.read()
            over.set()
            await handler.over.wait()

    run(test())


def test_frames_before_the_break_are_still_received() -> None:
    async def test() -> None:
        async def three_and_fail(link: Link) -> None:
            for microbatch in range(3):
                await link.send(forward(microbatch))
            await link.receive()
            raise PeerError("enough")

        async with linked(three_and_fail) as (handler, link):
            await link.send(forward(1))
            await handler.over.wait()
            for microbatch in range(3):
                frame = await link.receive()
                assert frame is not None
                assert frame.microbatch == microbatch
            with pytest.raises(PeerError, match=r"^enough$"):
                await link.receive()

    run(test())


@pytest.mark.parametrize("how", ["another node", "no neighbour", "the called node itself"])
def test_only_a_neighbouring_stage_may_link(how: str) -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            caller, words = OTHER, "other may not call Link: before may"
            if how == "no neighbour":
                handler.server.neighbours, caller = (), BEFORE
                words = "before may not call Link: no node may"
            elif how == "the called node itself":
                caller, words = CALLED, "called may not call Link: before may"
            with pytest.raises(PeerError, match=f"called at {address} did not accept this node: {words}"):
                await dial_link(address, CALLED.node_id, caller)
            assert not handler.over.is_set()

    run(test())


def test_the_neighbours_change_with_a_deployment() -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            handler.server.neighbours = {OTHER.node_id}
            with pytest.raises(PeerError, match="before may not call Link: other may"):
                await dial_link(address, CALLED.node_id, BEFORE)
            link = await dial_link(address, CALLED.node_id, OTHER)
            link.abort()
            await link.stream.finished()

    run(test())


@pytest.mark.parametrize("shown", ["no certificate", "an invite", "another swarm's certificate", "the coordinator's"])
def test_a_link_without_a_nodes_certificate_is_refused(shown: str) -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            keys, code = BEFORE.tls_keys(), grpc.StatusCode.UNAVAILABLE
            credentials = grpc.ssl_channel_credentials(keys.roots)
            if shown == "an invite":
                token = SWARM.invite("127.0.0.1", 1).token
                credentials = channel_credentials(joiner_keys(token, SWARM.authority.certificate))
            elif shown == "another swarm's certificate":
                credentials = channel_credentials(
                    replace(a_node(Admission.in_memory(), "before").tls_keys(), roots=keys.roots)
                )
            elif shown == "the coordinator's":
                credentials, code = channel_credentials(SWARM.authority.tls_keys()), grpc.StatusCode.UNAUTHENTICATED
            async with aio.secure_channel(address, credentials, expecting(node_host("called"))) as channel:
                call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/ravnest.v1.Provider/Link")()
                with pytest.raises(aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is code
            assert not handler.over.is_set()

    run(test())


def test_a_link_goes_to_the_node_it_is_meant_for_or_nowhere() -> None:
    async def test() -> None:
        async with provider(echo) as (handler, address):
            with pytest.raises(PeerError, match="another node of this swarm than the one expected there"):
                await dial_link(address, OTHER.node_id, BEFORE)
            assert not handler.over.is_set()

    run(test())


def channel_of_before(address: str) -> aio.Channel:
    return open_secure_channel(address, BEFORE.tls_keys(), node_host(CALLED.node_id))
