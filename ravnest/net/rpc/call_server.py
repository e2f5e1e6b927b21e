"""Server of calls, shared by coordinator and provider: admits a caller, runs its stream, and ends it with a reason.

The handler of a stream runs in a task of the server, not in the coroutine that grpc.aio makes for the call. grpc.aio
cancels that coroutine when the caller is gone, but a handler should get a PeerError from its stream, at an await of its
own, instead of being cancelled anywhere.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from ravnest.background import BackgroundTasks
from ravnest.errors import PeerError, RavnestError, RefusedError
from ravnest.net.address import peer_host
from ravnest.net.connection import JOIN_BYTES, SERVER_OPTIONS, bind_port
from ravnest.net.door.budgets import budgets_for
from ravnest.net.door.descriptors import raise_descriptor_limit
from ravnest.net.door.doorkeeper import Doorkeeper, TurnedAway
from ravnest.net.identity.identity import AuthContext, Identity, Kind
from ravnest.net.identity.tls import TlsKeys, server_credentials
from ravnest.net.streams.frame_stream import Control, Link, RelayEnd
from ravnest.net.streams.grpc_errors import DETAILS_CHARACTERS
from ravnest.net.streams.stream import ByteStream
from ravnest.net.streams.wire import CalledWire

REQUEST_KEY: Final = "ravnest-join-bin"
"""Metadata key of the request, in a call with one request. gRPC limits the size of metadata before it keeps any of it,
while a message may be as large as the largest frame; and callers of such a call may not have joined yet."""

ACCEPTED_KEY: Final = "ravnest-accepted"
"""Metadata key of the server's answer that it has admitted a stream."""

LINK_KEY: Final = "ravnest-link"
"""Metadata key of the link's name, in a call that carries a link."""

LINGER_SECONDS: Final = 10.0
"""Timeout for the caller to hang up after the stream has ended."""

MAX_STREAMS: Final = 256
"""Streams that one node may have open here, over all its connections. Each costs a task and buffers."""

NODES: Final[tuple[Kind, ...]] = ("node",)

OnTurnedAway = Callable[[TurnedAway], None]
"""Called rarely, with a report about connections that used more than their share of a port."""

Context = Any
"""A grpc.aio.ServicerContext of bytes."""

Method = Any
"""A grpc.RpcMethodHandler of bytes."""

MadeT = TypeVar("MadeT", Link, RelayEnd, Control[Any, Any])
RequestT = TypeVar("RequestT", bound=Message)

log = logging.getLogger(__name__)


class CallServer:
    """A gRPC server for one service. Subclasses define its methods with `stream` and `unary`, then `start` it."""

    service: ClassVar[str]
    """Full name of the service."""

    def __init__(self, keys: Callable[[], TlsKeys], on_turned_away: OnTurnedAway) -> None:
        """`keys` returns the keys of the port; `on_turned_away` is called on the loop on which `start` runs."""
        self._keys = keys
        self._on_turned_away = on_turned_away
        self._door = Doorkeeper()
        self._ends: dict[str, set[ByteStream]] = {}
        self._server: aio.Server | None = None
        self._tasks = BackgroundTasks(_log_error)

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, which the system chooses for port 0. RunError when the address cannot be used."""
        assert self._server is None, "a server starts once"
        budgets = budgets_for(raise_descriptor_limit())
        server = aio.server(options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", budgets.incoming)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service, self.methods()),))
        loop = asyncio.get_running_loop()
        bound = bind_port(server, host, port, server_credentials(self._keys, self._door.knock))
        self._server = server
        await server.start()
        self._door.start(host, bound, budgets, lambda report: _soon(loop, self._on_turned_away, report))
        return bound

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Accept no more calls, give running ones `grace_seconds` to end, then break them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)
        self._door.stop()
        await self._tasks.close()

    def methods(self) -> dict[str, Method]:
        """The methods by name."""
        raise NotImplementedError

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        """The identity of a caller; PeerError when it may not make this call."""
        raise NotImplementedError

    def drop(self, node_id: str, reason: str) -> None:
        """Break every stream of this node, which gets the reason."""
        for stream in list(self._ends.get(node_id, ())):
            stream.fail(RefusedError(reason))

    def stream(
        self,
        name: str,
        make: Callable[[CalledWire], MadeT],
        run: Callable[[str, MadeT], Coroutine[Any, Any, None]],
        kinds: Collection[Kind] = NODES,
    ) -> Method:
        """A method for callers of these kinds. It makes the called end of a stream and runs `run(caller, end)`.

        The caller is the id of a node, or `invite:ID`.
        """

        async def serve(_: object, context: Context) -> None:
            identity = await self._admit(context, kinds, name)
            caller = _named(identity)
            if len(self._ends.get(caller, ())) >= MAX_STREAMS:
                await _refuse(context, PeerError(f"{caller} has {MAX_STREAMS} streams open here, and may have no more"))
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            label = dict(context.invocation_metadata() or ()).get(LINK_KEY)
            end = make(wire := CalledWire(context, caller, label if isinstance(label, str) else ""))
            self._ends.setdefault(caller, set()).add(end.stream)
            handler = self._tasks.spawn(run(caller, end))
            try:
                await asyncio.wait({handler, wire.ended}, return_when=asyncio.FIRST_COMPLETED)
                refusal = _refusal(handler) if handler.done() else None
                await end.stream.close(refusal)
                await end.stream.finished()
                if end.stream.error is not None:
                    await _refuse(context, end.stream.error)
                if not wire.caller_ended:
                    # The caller hangs up when it has read how the stream ended, which cancels this coroutine.
                    await asyncio.sleep(LINGER_SECONDS)
                if refusal is not None:
                    await _refuse(context, refusal)
            except asyncio.CancelledError:
                end.stream.fail(PeerError(f"{caller} went away in the middle of the stream"))
                raise
            finally:
                self._ends[caller].discard(end.stream)
                if not self._ends[caller]:
                    del self._ends[caller]

        return grpc.stream_stream_rpc_method_handler(serve)

    def unary(
        self,
        name: str,
        kinds: Collection[Kind],
        request_type: type[RequestT],
        run: Callable[[Identity, RequestT, str], Coroutine[Any, Any, Message]],
    ) -> Method:
        """A method for callers of these kinds: one small request, one reply. Messages of the caller are not read.

        `run` gets the caller, the request, and the host that the call comes from.
        """

        async def serve(_: object, context: Context) -> bytes:
            caller = await self._admit(context, kinds, name)
            data = dict(context.invocation_metadata() or ()).get(REQUEST_KEY)
            request = request_type()
            try:
                if not isinstance(data, bytes) or len(data) > JOIN_BYTES:
                    raise ValueError(f"it is missing, or larger than {JOIN_BYTES} bytes")
                request.ParseFromString(data)
            except (DecodeError, ValueError) as error:
                await _refuse(context, RefusedError(f"the request cannot be read: {error}"))
            handler = self._tasks.spawn(run(caller, request, peer_host(context.peer())))
            await asyncio.wait({handler})
            if (refusal := _refusal(handler)) is not None:
                await _refuse(context, refusal)
            return handler.result().SerializeToString()

        return grpc.stream_unary_rpc_method_handler(serve)

    async def _admit(self, context: Context, kinds: Collection[Kind], call: str) -> Identity:
        try:
            identity = self.caller(context.auth_context(), kinds, call)
            self._door.calls(context.peer(), _named(identity))
            return identity
        except PeerError as error:
            sentence = str(error)
        except RavnestError:
            log.exception("cannot tell who calls")
            await _refuse(context, PeerError("the other side cannot tell who calls at the moment; see its log"))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence[:DETAILS_CHARACTERS])
        raise AssertionError("abort returns by raising")


def log_turned_away(report: TurnedAway) -> None:
    """The default of `on_turned_away`: log the report."""
    log.warning("%s", report)


def _log_error(error: BaseException) -> None:
    if isinstance(error, RavnestError):
        log.info("a stream ended: %s", error)
    else:
        log.error("a call failed inside this node", exc_info=error)


def _soon(loop: asyncio.AbstractEventLoop, call: OnTurnedAway, report: TurnedAway) -> None:
    # The loop is closed if the process was interrupted meanwhile.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, report)


def _named(identity: Identity) -> str:
    """The id of a node, or `invite:ID`."""
    return identity.name if identity.kind == "node" else f"{identity.kind}:{identity.name}"


def _refusal(handler: "asyncio.Task[Any]") -> PeerError | None:
    """How to end a call whose handler raised: with the message of our own errors, and for others with a hint to the
    log."""
    if handler.cancelled():
        return PeerError("the other side is stopping")
    error = handler.exception()
    if error is None or isinstance(error, PeerError):
        return error
    if isinstance(error, RavnestError):
        return RefusedError(str(error))
    return PeerError(f"the other side failed with a {type(error).__name__}; see its log")


async def _refuse(context: Context, error: PeerError) -> NoReturn:
    final = isinstance(error, RefusedError)
    code = grpc.StatusCode.FAILED_PRECONDITION if final else grpc.StatusCode.ABORTED
    await context.abort(code, str(error)[:DETAILS_CHARACTERS])
    raise AssertionError("abort returns by raising")
