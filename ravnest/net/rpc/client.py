"""Calls of a provider: to the coordinator, and to the stage after its own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from grpc import aio

from ravnest.errors import PeerError, RefusedError
from ravnest.net.address import split_address
from ravnest.net.connection import JOIN_BYTES, JOIN_TIMEOUT_SECONDS
from ravnest.net.identity.identity import COORDINATOR_HOST, is_node_id, node_host
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import TlsKeys, open_secure_channel
from ravnest.net.probe.measuring import LinkSpeed, measure_link
from ravnest.net.rpc.call_server import ACCEPTED_KEY, LINK_KEY, REQUEST_KEY
from ravnest.net.rpc.server import COORDINATOR_SERVICE, PROVIDER_SERVICE, split
from ravnest.net.streams.frame_stream import Control, Link
from ravnest.net.streams.grpc_errors import broken, peer_error
from ravnest.net.streams.wire import CallerWire
from ravnest.net.v1.control_pb2 import (
    CheckReply,
    CheckRequest,
    Chunk,
    FetchRequest,
    JoinReply,
    JoinRequest,
    MeasureReply,
    MeasureRequest,
    UploadHeader,
    UploadReply,
)

RepliedT = TypeVar("RepliedT")


class CoordinatorClient:
    """A connection to the coordinator: with the keys of an invite for `join`, with those of a node for all other calls.

    Every method raises PeerError when the coordinator cannot be reached, is not of this swarm, refuses or breaks off.
    """

    def __init__(self, address: str, keys: TlsKeys, shown: str) -> None:
        """`shown` names the owner of `keys`, as in "this invite" or "the certificate of anna"."""
        split_address(address)
        self.address = address
        self._peer = f"the coordinator at {address}"
        self._shown = shown
        self._channel = open_secure_channel(address, keys, COORDINATOR_HOST)

    async def join(self, request: JoinRequest) -> JoinReply:
        """Ask for admission; the reply has the certificate for all other calls."""
        data = request.SerializeToString()
        if len(data) > JOIN_BYTES:
            raise PeerError(f"the description of this provider takes more than {JOIN_BYTES} bytes; shorten its --name")
        return await self._ask("Join", data, JoinReply.FromString)

    async def check(self, request: CheckRequest) -> CheckReply:
        """Ask whether `join` would be admitted, without using up the invite."""
        return await self._ask("Check", request.SerializeToString(), CheckReply.FromString)

    async def measure(self) -> LinkSpeed:
        """Measure the connection. Takes a few seconds, or more if many providers measure at once."""
        return await measure_link(await self.open_measuring())

    async def open_measuring(self) -> Control[MeasureRequest, MeasureReply]:
        """The stream of a measurement."""
        return Control(await self._dial("Measure"), MeasureReply)

    async def control(self, session: str) -> Link:
        """A connection for the link of control messages."""
        return Link(await self._dial("Control", session))

    async def feed(self, session: str) -> Link:
        """A connection for the link of frames to and from the coordinator."""
        return Link(await self._dial("Feed", session))

    async def relay(self, link: str) -> Link:
        """A connection for a link between stages, which the coordinator relays to the other end."""
        return Link(await self._dial("Relay", link))

    async def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of an artifact from `offset` on, up to `end` unless it is 0. Leaving the loop early ends the
        transfer."""
        control: Control[FetchRequest, Chunk] = Control(await self._dial("Fetch"), Chunk)
        try:
            await control.send(FetchRequest(artifact=artifact, offset=offset, end=end))
            while (chunk := await control.receive()) is not None:
                if chunk.offset != offset:
                    raise RefusedError(f"{self._peer} sent {artifact!r} from byte {chunk.offset}, not {offset}")
                offset += len(chunk.data)
                yield chunk.data
        finally:
            control.abort()

    async def upload(self, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Send the chunks under this name; returns once the coordinator has stored all of them."""
        control: Control[Chunk, UploadReply] = Control(await self._dial("Upload"), UploadReply)
        try:
            offset = 0
            await _send_or_learn(control, Chunk(header=UploadHeader(name=name)))
            async for data in split(chunks):
                await _send_or_learn(control, Chunk(data=data, offset=offset))
                offset += len(data)
            await _send_or_learn(control, Chunk(offset=offset, last=True))
            reply = await control.receive()
            if reply is None or reply.size_bytes != offset:
                raise PeerError(f"{self._peer} did not take the upload {name!r} in full")
        finally:
            control.abort()

    async def close(self) -> None:
        """Drop the connection; streams still open break. Idempotent."""
        await self._channel.close()

    async def _ask(self, method: str, request: bytes, read: Callable[[bytes], RepliedT]) -> RepliedT:
        call = self._channel.unary_unary(
            f"/{COORDINATOR_SERVICE}/{method}", request_serializer=bytes, response_deserializer=read
        )
        try:
            return await call(b"", metadata=((REQUEST_KEY, request),), timeout=JOIN_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise broken(self._peer, error, self._shown) from None

    async def _dial(self, method: str, label: str = "") -> CallerWire:
        return await _dial(
            self._channel, f"/{COORDINATOR_SERVICE}/{method}", self._peer, self._shown, _nothing_to_release, label
        )


async def dial_link(address: str, node_id: str, node: NodeIdentity, link: str = "") -> Link:
    """A connection for a link from this stage, on `node`, to the stage of `node_id`, which listens at `address`.

    PeerError when the other node is unreachable, has another identity, or refuses. The link has its own gRPC
    connection, which closes when the link is over.
    """
    return Link(await _dial_node(address, node_id, node, "Link", link))


async def measure_peer(address: str, node_id: str, node: NodeIdentity) -> LinkSpeed:
    """Measure the connection from `node` to `node_id`, which listens at `address`.

    PeerError when the other node is unreachable, has another identity, refuses, or cannot be measured.
    """
    control: Control[MeasureRequest, MeasureReply] = Control(
        await _dial_node(address, node_id, node, "Measure"), MeasureReply
    )
    try:
        return await measure_link(control)
    finally:
        await control.stream.finished()


async def _dial_node(address: str, node_id: str, node: NodeIdentity, method: str, label: str = "") -> CallerWire:
    split_address(address)
    if not is_node_id(node_id):
        raise PeerError(f"{node_id!r} is not the id of a node; the coordinator gave no neighbour to link to")
    channel = open_secure_channel(address, node.tls_keys(), node_host(node_id))
    peer, shown = f"{node_id} at {address}", f"the certificate of {node.node_id}"
    try:
        return await _dial(channel, f"/{PROVIDER_SERVICE}/{method}", peer, shown, channel.close, label)
    except BaseException:
        await channel.close()
        raise


async def _dial(
    channel: aio.Channel, method: str, peer: str, shown: str, release: Callable[[], Awaitable[None]], label: str
) -> CallerWire:
    """Open a stream and wait until the other side has admitted it, so that a refusal is raised here."""
    call: aio.StreamStreamCall[bytes, bytes]
    try:
        call = channel.stream_stream(method)(metadata=((LINK_KEY, label),) if label else None)
    except Exception as error:  # a closed channel
        raise broken(peer, error, shown) from None
    try:
        accepted = dict(await call.initial_metadata() or ())
        if ACCEPTED_KEY in accepted:
            return CallerWire(call, peer, release, label)
        raise peer_error(peer, await call.code(), await call.details(), shown)
    except asyncio.CancelledError:
        call.cancel()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PeerError(f"the connection to {peer} was closed on this side") from None
    except PeerError:
        raise
    except Exception as error:
        call.cancel()
        raise broken(peer, error, shown) from None


async def _send_or_learn(control: Control[Chunk, UploadReply], chunk: Chunk) -> None:
    try:
        await control.send(chunk)
    except PeerError:
        # The call is over. Reading on raises an error with the reason.
        await control.receive()
        raise


async def _nothing_to_release() -> None:
    """The channel belongs to the client, not to the stream."""
