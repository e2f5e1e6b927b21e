"""The dialling side: a provider's line to the coordinator, and a stage's link to the stage after it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from grpc import aio

from ravnest.errors import PeerError
from ravnest.net.calls import ACCEPTED_KEY, SESSION_KEY
from ravnest.net.credentials import JOIN_TIMEOUT_SECONDS, Credentials, open_channel
from ravnest.net.failures import broken, peer_error
from ravnest.net.link import Control, Link
from ravnest.net.server import COORDINATOR_SERVICE, PROVIDER_SERVICE, split
from ravnest.net.v1.control_pb2 import (
    Chunk,
    CoordinatorMessage,
    FetchRequest,
    JoinReply,
    JoinRequest,
    ProviderMessage,
    UploadHeader,
    UploadReply,
)
from ravnest.net.wire import CallerWire

LOOPBACK: Final = Credentials.loopback()


class CoordinatorClient:
    """A provider's connection to its coordinator. Everything but `join` needs the session that `join` brought.

    Every method raises PeerError when the coordinator cannot be reached, refuses or breaks off.
    """

    def __init__(self, address: str, credentials: Credentials = LOOPBACK, session: str = "") -> None:
        self.address = address
        self.session = session
        self._peer = f"the coordinator at {address}"
        self._channel = open_channel(address, credentials)

    async def join(self, request: JoinRequest) -> JoinReply:
        """Ask to be admitted; the session in the reply is used for the later calls."""
        call = self._channel.unary_unary(
            f"/{COORDINATOR_SERVICE}/Join",
            request_serializer=JoinRequest.SerializeToString,
            response_deserializer=JoinReply.FromString,
        )
        try:
            reply = await call(request, timeout=JOIN_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise broken(self._peer, error) from None
        self.session = reply.session
        return reply

    async def control(self) -> Control[ProviderMessage, CoordinatorMessage]:
        """Open the control stream."""
        return Control(await self._dial("Control"), CoordinatorMessage)

    async def feed(self) -> Link:
        """Open the stream of frames to and from the coordinator."""
        return Link(await self._dial("Feed"))

    async def fetch(self, artifact: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The bytes of an artifact from `offset` on. Leaving the loop early ends the transfer."""
        control: Control[FetchRequest, Chunk] = Control(await self._dial("Fetch"), Chunk)
        try:
            await control.send(FetchRequest(artifact=artifact, offset=offset))
            while (chunk := await control.receive()) is not None:
                if chunk.offset != offset:
                    raise PeerError(f"{self._peer} sent {artifact!r} from byte {chunk.offset}, not {offset}")
                offset += len(chunk.data)
                yield chunk.data
        finally:
            control.abort()

    async def upload(self, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Send what `chunks` yields under this name; returns once the coordinator has taken it in full."""
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

    async def _dial(self, method: str) -> CallerWire:
        return await _dial(
            self._channel, f"/{COORDINATOR_SERVICE}/{method}", self.session, self._peer, _nothing_to_release
        )


async def dial_link(address: str, session: str, credentials: Credentials = LOOPBACK) -> Link:
    """Link this stage to the one that listens at `address`. PeerError when it is unreachable or refuses.

    The link has a connection of its own, which goes when the link is over.
    """
    channel = open_channel(address, credentials)

    async def close_channel() -> None:
        await channel.close()

    try:
        return Link(await _dial(channel, f"/{PROVIDER_SERVICE}/Link", session, address, close_channel))
    except BaseException:
        await channel.close()
        raise


async def _dial(
    channel: aio.Channel, method: str, session: str, peer: str, release: Callable[[], Awaitable[None]]
) -> CallerWire:
    """Open a stream and wait until the other side has let it in, so that a refusal is raised here."""
    if not session or not session.isascii() or not session.isprintable():
        raise PeerError(f"this node has no valid session with {peer}; join first")
    call: aio.StreamStreamCall[bytes, bytes]
    try:
        call = channel.stream_stream(method)(metadata=((SESSION_KEY, session),))
    except Exception as error:  # a closed channel
        raise broken(peer, error) from None
    try:
        accepted = dict(await call.initial_metadata() or ())
        if ACCEPTED_KEY in accepted:
            return CallerWire(call, peer, release)
        raise peer_error(peer, await call.code(), await call.details())
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
        raise broken(peer, error) from None


async def _send_or_learn(control: Control[Chunk, UploadReply], chunk: Chunk) -> None:
    try:
        await control.send(chunk)
    except PeerError:
        # The call is over: the reason, which is better than "it is over", comes with its end.
        await control.receive()
        raise


async def _nothing_to_release() -> None:
    """The channel belongs to the client, not to the stream."""
