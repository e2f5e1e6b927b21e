"""Joining, control, artifacts and uploads over a real socket, and the sentences of what is refused."""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
from swarm_ends import Coordinator, coordinator, run

from ravnest.errors import PeerError, RunError
from ravnest.net import CoordinatorClient, CoordinatorServer, Credentials, Frame, FrameKind, dial_link
from ravnest.net.v1.control_pb2 import JoinRequest, ProviderMessage


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def test_a_provider_joins_and_speaks() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            reply = await client.join(JoinRequest(token="good", name="desk"))
            assert (reply.node_id, reply.heartbeat_seconds) == ("node-1", 2.0)
            control = await client.control()
            for number in range(20):
                message = ProviderMessage()
                message.ready.deployment = str(number)
                await control.send(message)
            for number in range(20):
                answer = await control.receive()
                assert answer is not None
                assert answer.start.deployment == f"node-1 {number}"
            link = await client.feed()
            await link.send(Frame(FrameKind.FEED, 5))
            frame = await link.receive()
            assert frame is not None
            assert (frame.kind, frame.microbatch) == (FrameKind.DONE, 5)
            await link.close()
            await control.close()
            assert await link.receive() is None
            assert await control.receive() is None

    run(test())


def test_a_refused_join_says_the_coordinators_sentence() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            with pytest.raises(PeerError, match=r"^the token of désk is not valid; ask for a new invite$"):
                await client.join(JoinRequest(token="bad", name="désk"))

    run(test())


def test_every_call_needs_the_session_of_a_join() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            for session, words in (
                ("", "join first"),
                ("wrong", "did not accept"),
                ("bad\nsession", "join first"),
            ):
                client.session = session
                for call in (client.control(), client.feed(), client.upload("x", pieces(b"data"))):
                    with pytest.raises(PeerError, match=words):
                        await call
                with pytest.raises(PeerError, match=words):
                    async for _ in client.fetch("weights"):
                        pass
            assert handler.uploads == {}

    run(test())


def test_an_artifact_arrives_whole_and_goes_on_from_any_byte() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            data = os.urandom(5_000_001)
            handler.artifacts = {"weights": data, "empty": b""}
            await client.join(JoinRequest(token="good"))
            chunks = [chunk async for chunk in client.fetch("weights")]
            assert max(len(chunk) for chunk in chunks) == 1 << 20
            assert hashlib.sha256(b"".join(chunks)).digest() == hashlib.sha256(data).digest()
            assert b"".join([chunk async for chunk in client.fetch("weights", 4_999_000)]) == data[4_999_000:]
            assert [chunk async for chunk in client.fetch("empty")] == []
            with pytest.raises(PeerError, match=r"^there is no artifact nothing$"):
                async for _ in client.fetch("nothing"):
                    pass
            fetching = client.fetch("weights")
            async for _ in fetching:
                break
            await fetching.aclose()  # type: ignore[attr-defined]
            assert len([chunk async for chunk in client.fetch("weights")]) == 5

    run(test())


def test_an_upload_arrives_whole() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            await client.join(JoinRequest(token="good"))
            data = os.urandom(3_500_000)
            await client.upload("state", pieces(data[:10], b"", data[10:]))
            await client.upload("nothing", pieces())
            assert handler.uploads == {"state": data, "nothing": b""}

    run(test())


def test_a_refused_upload_says_why_and_does_not_hang() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            await client.join(JoinRequest(token="good"))
            with pytest.raises(PeerError, match=r"^the disk is full; free some space$"):
                await client.upload("state", pieces(b"refuse me", *[bytes(1 << 20)] * 30))

    run(test())


def test_an_upload_that_breaks_off_is_never_taken_for_whole() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            await client.join(JoinRequest(token="good"))

            async def failing() -> AsyncIterator[bytes]:
                yield b"some"
                await handler.upload_begun.wait()
                raise OSError("the disk broke")

            with pytest.raises(OSError, match="the disk broke"):
                await client.upload("state", failing())
            await handler.upload_over.wait()
            assert [type(error) for error in handler.upload_errors] == [PeerError]
            assert handler.uploads == {}

    run(test())


def test_a_taken_port_is_a_sentence_with_the_address_and_the_fix() -> None:
    async def test() -> None:
        first = CoordinatorServer(Coordinator(), Credentials.loopback())
        port = await first.start("127.0.0.1", 0)
        second = CoordinatorServer(Coordinator(), Credentials.loopback())
        with pytest.raises(RunError, match=f"127.0.0.1:{port}.*--listen"):
            await second.start("127.0.0.1", port)
        await first.stop(grace_seconds=0)
        await second.stop(grace_seconds=0)

    run(test())


def test_a_freed_port_can_be_had_again() -> None:
    async def test() -> None:
        port = 0
        for _ in range(2):
            server = CoordinatorServer(Coordinator(), Credentials.loopback())
            port = await server.start("127.0.0.1", port)
            client = CoordinatorClient(f"127.0.0.1:{port}")
            await client.join(JoinRequest(token="good"))
            await server.stop(grace_seconds=0)
            await client.close()

    run(test())


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.5", "example.org"])
def test_plaintext_leaves_this_machine_in_neither_direction(host: str) -> None:
    async def test() -> None:
        with pytest.raises(RunError, match="without TLS"):
            await CoordinatorServer(Coordinator(), Credentials.loopback()).start(host, 0)
        with pytest.raises(PeerError, match="plaintext"):
            CoordinatorClient(f"{host}:7700")
        with pytest.raises(PeerError, match="plaintext"):
            await dial_link(f"{host}:7700", "session")

    run(test())


def test_nobody_at_the_address_is_a_sentence() -> None:
    async def test() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
            client = CoordinatorClient(address, session="session-1")
            for call in (client.join(JoinRequest()), client.control(), dial_link(address, "secret")):
                with pytest.raises(PeerError, match=f"cannot reach .*{address}: .*[Rr]efused.*; check"):
                    await call
            await client.close()

    run(test())


def test_a_closed_client_raises_peer_error_everywhere() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            await client.join(JoinRequest(token="good"))
            control = await client.control()
            receiving = asyncio.create_task(control.receive())
            await asyncio.sleep(0)
            await client.close()
            await client.close()
            with pytest.raises(PeerError, match="closed on this side"):
                await receiving
            with pytest.raises(PeerError):
                await control.send(ProviderMessage(ready={"deployment": "x"}))
            for call in (client.join(JoinRequest(token="good")), client.control(), client.feed()):
                with pytest.raises(PeerError):
                    await call

    run(test())


def test_a_coordinator_that_stops_while_nobody_listens_stops_at_once() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            await client.join(JoinRequest(token="good"))
            control = await client.control()
            link = await client.feed()
        for receive in (control.receive(), link.receive()):
            with pytest.raises(PeerError):
                await receive

    run(test())
