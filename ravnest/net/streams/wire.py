"""The two ends of one gRPC stream of bytes, behind one small interface.

Both ends say "that was all" with an empty message, because what grpc.aio tells at the end of a stream is not enough.
To the called side a half-close looks exactly like a caller that died. To the caller, a write that meets the end of the
call turns the status of the call into an internal error, and messages that had arrived into nothing. So the called
side says in a message how the stream ended, and leaves the call open until the caller has read that and hung up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from ravnest.errors import PeerError, RefusedError
from ravnest.net.streams.grpc_errors import DETAILS_CHARACTERS, broken, peer_error

END: Final = b""
"""That was all, in order."""

REFUSED: Final = b"RVN\xff"
BROKEN: Final = b"RVN\xfe"
"""From the called side: that was all, because of an error, whose sentence follows; and whether it would be the same if
the call were made again. No frame or message begins so."""


class Wire(Protocol):
    """One end of a stream. Every method raises PeerError, and nothing else, when the stream is broken."""

    peer: str
    label: str
    """What the dialling side says the stream is for: the name of the link that it carries."""
    dialled: bool
    """Whether this end dialled. The called end's orderly end is the end of the stream, both ways."""

    async def read(self) -> bytes | None:
        """The next message; None at the peer's orderly end."""

    async def write(self, message: bytes) -> None:
        """Hand a message to the connection; returns when it takes the next one."""

    async def end(self, refusal: PeerError | None) -> None:
        """Say that nothing more will be written and, on the called side, which error is the reason if one is."""

    async def release(self) -> None:
        """Give up whatever the stream still holds; the peer notices if the stream had not ended."""


class CallerWire:
    """The end that dialled."""

    dialled = True

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
        """Why nothing can be written to a call that is over."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return PeerError(f"{self.peer} has ended the stream")
        return peer_error(self.peer, code, await self._call.details())


class CalledWire:
    """The end that was called. `ended` is done once this side is over, `caller_ended` set when the caller has ended."""

    dialled = False
    caller_ended = False

    def __init__(self, context: "aio.ServicerContext[bytes, bytes]", peer: str, label: str = "") -> None:
        self.peer = peer
        self.label = label
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
    # grpc.aio raises CancelledError both when our task is cancelled and when the call is, by closing its channel.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return PeerError(f"the connection to {peer} was closed on this side")
