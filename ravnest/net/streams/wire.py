"""The two ends of one gRPC stream of bytes, with the same small interface.

Both ends announce their orderly end with an empty message, because grpc.aio tells too little about the end of a stream.
To the called side, a half-close looks exactly like a caller that died. For the caller, a write after the end of the
call turns the call's status into an internal error, and loses messages that had arrived. So the called side sends a
message that says how the stream ended, and leaves the call open until the caller has read that and hung up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from ravnest.errors import PeerError, RefusedError
from ravnest.net.address import peer_host
from ravnest.net.streams.grpc_errors import DETAILS_CHARACTERS, broken, peer_error

END: Final = b""
"""The orderly end."""

REFUSED: Final = b"RVN\xff"
BROKEN: Final = b"RVN\xfe"
"""The called side ended the stream because of an error, whose message follows. REFUSED: a retry would fail in the same
way; BROKEN: it may succeed. No frame or message begins with these bytes."""


class Wire(Protocol):
    """One end of a stream. Every method raises PeerError, and nothing else, when the stream is broken."""

    peer: str
    label: str
    """The purpose of the stream as the dialling side gives it: the name of the link that it carries."""
    host: str
    """The host from which the other end dialled; empty on the dialling side."""
    dialled: bool
    """Whether this end dialled. The called end's orderly end is the end of the stream, both ways."""

    async def read(self) -> bytes | None:
        """The next message; None at the peer's orderly end."""

    async def write(self, message: bytes) -> None:
        """Hand a message to the connection; returns when the connection accepts the next one."""

    async def end(self, refusal: PeerError | None) -> None:
        """Announce the end and, on the called side, the error that is the reason, if there is one."""

    async def release(self) -> None:
        """Release everything that the stream still holds; the peer notices if the stream had not ended."""


class CallerWire:
    """The dialling end."""

    dialled = True
    host = ""

    def __init__(
        self,
        call: "aio.StreamStreamCall[bytes, bytes]",
        peer: str,
        release: Callable[[], Awaitable[None]],
        label: str = "",
    ) -> None:
        self.peer = peer
        self.label = label
        self._call = call
        self._release = release

    async def read(self) -> bytes | None:
        try:
            message: Any = await self._call.read()
        except asyncio.CancelledError:
            raise _cancelled(self.peer) from None
        except Exception as error:
            raise broken(self.peer, error) from None
        if message is aio.EOF or message == END:
            return None
        if message.startswith((REFUSED, BROKEN)):
            words = message[len(REFUSED) :][:DETAILS_CHARACTERS].decode(errors="replace")
            raise (RefusedError if message.startswith(REFUSED) else PeerError)(words)
        return bytes(message)

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            raise _cancelled(self.peer) from None
        except asyncio.InvalidStateError:
            raise await self._finished() from None
        except Exception as error:
            raise broken(self.peer, error) from None

    async def end(self, refusal: PeerError | None) -> None:
        await self.write(END)
        try:
            await self._call.done_writing()
        except asyncio.CancelledError:
            raise _cancelled(self.peer) from None
        except Exception as error:
            raise broken(self.peer, error) from None

    async def release(self) -> None:
        if not self._call.done():
            self._call.cancel()
        await self._release()

    async def _finished(self) -> PeerError:
        """The reason why nothing can be written to a call that is over."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return PeerError(f"{self.peer} has ended the stream")
        return peer_error(self.peer, code, await self._call.details())


class CalledWire:
    """The called end. `ended` is done once this side is over; `caller_ended` is set when the caller has ended."""

    dialled = False
    caller_ended = False

    def __init__(self, context: "aio.ServicerContext[bytes, bytes]", peer: str, label: str = "") -> None:
        self.peer = peer
        self.label = label
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.host = peer_host(context.peer())
        self._context = context

    async def read(self) -> bytes | None:
        try:
            message: Any = await self._context.read()
        except asyncio.CancelledError:
            raise _cancelled(self.peer) from None
        except Exception as error:
            raise broken(self.peer, error) from None
        if message is aio.EOF:
            raise PeerError(f"{self.peer} went away in the middle of the stream")
        if message == END:
            self.caller_ended = True
            return None
        return bytes(message)

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            raise _cancelled(self.peer) from None
        except Exception as error:
            raise broken(self.peer, error) from None

    async def end(self, refusal: PeerError | None) -> None:
        if refusal is None:
            await self.write(END)
        else:
            kind = REFUSED if isinstance(refusal, RefusedError) else BROKEN
            await self.write(kind + str(refusal)[:DETAILS_CHARACTERS].encode())
        if not self.ended.done():
            self.ended.set_result(None)

    async def release(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _cancelled(peer: str) -> BaseException:
    # grpc.aio raises CancelledError when our task is cancelled, and also when the call is, by closing its channel.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return PeerError(f"the connection to {peer} was closed on this side")
