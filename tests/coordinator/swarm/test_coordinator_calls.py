"""Joining, control, artifacts and uploads over a real socket, and the sentences of what is refused."""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from grpc import aio

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError, RunError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.identity import COORDINATOR_HOST
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.tls import open_secure_channel
from ravnest.net.rpc.call_server import REQUEST_KEY
from ravnest.net.rpc.client import CoordinatorClient, dial_link
from ravnest.net.v1.control_pb2 import JoinRequest
from tests.net.secure_ends import plain_server
from tests.net.swarm_ends import BEFORE, Coordinator, a_node, coordinator, echo, provider, run


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def test_a_provider_joins_and_speaks() -> None:
    async def test() -> None:
        async with coordinator() as (handler, _):
            node = NodeIdentity.new()
            reply = await handler.joiner().join(JoinRequest(certificate_request=node.request(), name="Désk"))
            assert (reply.node_id, reply.heartbeat_seconds) == ("d-sk", 2.0)
            assert node.adopt(reply.certificate, handler.admission.authority.certificate) == "d-sk"
            client = handler.client(node.tls_keys())
            assert reply.session == "127.0.0.1"
            control = await client.control(reply.session)
            for number in range(20):
                await control.send(Frame(FrameKind.CONTROL, number))
            for number in range(20):
                answer = await control.receive()
                assert answer is not None
                assert answer.microbatch == number + 1
            link = await client.feed(reply.session)
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
        async with coordinator() as (handler, _):
            with pytest.raises(
                PeerError, match=r"^the certificate request cannot be used: .*; join again with a new key$"
            ):
                await handler.joiner().join(JoinRequest(certificate_request=b"\x00", name="désk"))

    run(test())


def test_a_node_that_has_joined_may_join_again_and_keeps_its_id() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            reply = await client.join(JoinRequest(certificate_request=NodeIdentity.new().request(), name="another"))
            assert reply.node_id == "node-1"

    run(test())


def test_a_request_to_join_is_small_or_not_read() -> None:
    async def test() -> None:
        async with coordinator() as (handler, _):
            keys = joiner_keys(handler.invite().token, handler.admission.authority.certificate)
            with pytest.raises(PeerError, match="takes more than 4096 bytes; shorten its --name"):
                await handler.client(keys).join(JoinRequest(name="x" * 5000))
            channel = open_secure_channel(handler.address, keys, COORDINATOR_HOST)
            call = channel.unary_unary("/ravnest.v1.Coordinator/Join")
            for metadata, words in (
                ((), "cannot be read: it is missing"),
                (((REQUEST_KEY, b"\xff" * 100),), "cannot be read"),
                (((REQUEST_KEY, bytes(4097)),), "larger than 4096 bytes"),
                (((REQUEST_KEY, bytes(40_000)),), "metadata"),
            ):
                with pytest.raises(aio.AioRpcError, match=words):
                    await call(b"", metadata=metadata, timeout=10)
            # A message may be as large as it likes: it stays where it is.
            with pytest.raises(aio.AioRpcError, match="it is missing"):
                await call(bytes(64 << 20), timeout=10)
            await channel.close()
            assert handler.joins == 0

    run(test())


def test_every_call_needs_the_certificate_of_a_join() -> None:
    async def test() -> None:
        async with coordinator() as (handler, _):
            kicked = a_node(handler.admission, "kicked")
            handler.admission.tokens.kick("kicked", 0.0)
            strangers = Admission.in_memory()
            roots = handler.admission.authority.tls_keys().roots
            stranger = replace(a_node(strangers, "node-1").tls_keys(), roots=roots)
            for client, words in (
                (handler.joiner(), "may not call .*: an invite is only for joining"),
                (handler.client(kicked.tls_keys()), "kicked was thrown out of the swarm"),
                (handler.client(stranger), "does not accept what this test showed"),
                (handler.client(handler.admission.authority.tls_keys()), "a node that has joined may, not the coord"),
            ):
                for call in (client.control("s"), client.feed("s"), client.upload("x", pieces(b"data"))):
                    with pytest.raises(PeerError, match=words):
                        await call
                with pytest.raises(PeerError, match=words):
                    async for _ in client.fetch("weights"):
                        pass
            assert handler.uploads == {}

    run(test())


def test_a_node_that_is_dropped_loses_every_stream_and_learns_why() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            other = handler.client(a_node(handler.admission, "other").tls_keys())
            control, link, unharmed = await client.control("s"), await client.feed("s"), await other.feed("s")
            handler.server.drop("node-1", "node-1 was thrown out of the swarm")
            for receive in (control.receive(), link.receive()):
                with pytest.raises(PeerError, match=r"^node-1 was thrown out of the swarm$"):
                    await receive
            await unharmed.send(Frame(FrameKind.FEED, 5))
            assert await unharmed.receive() is not None

    run(test())


def test_an_artifact_arrives_whole_and_goes_on_from_any_byte() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):
            data = os.urandom(5_000_001)
            handler.artifacts = {"weights": data, "empty": b""}
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
            data = os.urandom(3_500_000)
            await client.upload("state", pieces(data[:10], b"", data[10:]))
            await client.upload("nothing", pieces())
            assert handler.uploads == {"state": data, "nothing": b""}

    run(test())


def test_a_refused_upload_says_why_and_does_not_hang() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            with pytest.raises(PeerError, match=r"^the disk is full; free some space$"):
                await client.upload("state", pieces(b"refuse me", *[bytes(1 << 20)] * 30))

    run(test())


def test_an_upload_that_breaks_off_is_never_taken_for_whole() -> None:
    async def test() -> None:
        async with coordinator() as (handler, client):

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
        first, second = Coordinator(), Coordinator()
        port = await first.server.start("127.0.0.1", 0)
        with pytest.raises(RunError, match=f"127.0.0.1:{port}.*--listen"):
            await second.server.start("127.0.0.1", port)
        await first.close()
        await second.close()

    run(test())


def test_a_freed_port_can_be_had_again() -> None:
    async def test() -> None:
        port = 0
        for _ in range(2):
            handler = Coordinator()
            handler.port = port = await handler.server.start("127.0.0.1", port)
            await handler.joiner().join(JoinRequest(certificate_request=NodeIdentity.new().request()))
            await handler.close()

    run(test())


def test_plaintext_reaches_no_call_even_on_this_machine() -> None:
    async def test() -> None:
        async with coordinator() as (handler, _), provider(echo) as (served, address):
            for place, method in ((handler.address, "Coordinator/Join"), (address, "Provider/Link")):
                async with aio.insecure_channel(place) as channel:
                    call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/ravnest.v1.{method}")()
                    with pytest.raises(aio.AioRpcError) as caught:
                        await call.read()
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert handler.joins == 0 and not served.over.is_set()

    run(test())


def test_nothing_is_said_to_a_server_without_tls() -> None:
    async def test() -> None:
        async with plain_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
            address = f"127.0.0.1:{port}"
            client = CoordinatorClient(address, BEFORE.tls_keys(), "the certificate of before")
            for call in (client.join(JoinRequest()), client.control("s"), dial_link(address, "called", BEFORE)):
                with pytest.raises(PeerError, match=f"{address} does not speak TLS"):
                    await call
            await client.close()

    run(test())


def test_nobody_at_the_address_is_a_sentence() -> None:
    async def test() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
            client = CoordinatorClient(address, BEFORE.tls_keys(), "the certificate of before")
            for call in (client.join(JoinRequest()), client.control("s"), dial_link(address, "called", BEFORE)):
                with pytest.raises(PeerError, match=f"cannot reach .*{address}: .*[Rr]efused.*; check"):
                    await call
            await client.close()

    run(test())


@pytest.mark.parametrize(("address", "node_id"), [("nowhere", "called"), ("127.0.0.1:7700", "*"), ("a b:1", "called")])
def test_an_address_or_a_node_that_cannot_be_is_a_peer_error(address: str, node_id: str) -> None:
    async def test() -> None:
        with pytest.raises(PeerError, match=r"is not an address|is not the id of a node"):
            await dial_link(address, node_id, BEFORE)

    run(test())


def test_a_closed_client_raises_peer_error_everywhere() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            control = await client.control("s")
            receiving = asyncio.create_task(control.receive())
            await asyncio.sleep(0)
            await client.close()
            await client.close()
            with pytest.raises(PeerError, match="closed on this side"):
                await receiving
            with pytest.raises(PeerError):
                await control.send(Frame(FrameKind.CONTROL, 1))
            for call in (client.join(JoinRequest()), client.control("s"), client.feed("s")):
                with pytest.raises(PeerError):
                    await call

    run(test())


def test_a_coordinator_that_stops_while_nobody_listens_stops_at_once() -> None:
    async def test() -> None:
        async with coordinator() as (_, client):
            control = await client.control("s")
            link = await client.feed("s")
        for receive in (control.receive(), link.receive()):
            with pytest.raises(PeerError):
                await receive

    run(test())
