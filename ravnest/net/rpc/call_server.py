"""The serving side that coordinator and provider share: admit a caller, run its stream, end it with a sentence.

Each stream's handler runs in a task of the server, not in the coroutine grpc.aio made for the call: that one is
cancelled when the caller vanishes, and a handler should see a PeerError from its stream then, at an await of its own
choosing, rather than be cancelled anywhere.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, NoReturn, TypeVar

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
"""Metadata of a call with one request: the request. gRPC bounds metadata before a byte of it is kept, while a message
may be as large as the largest frame; and the callers of such a call need not have joined yet."""

ACCEPTED_KEY: Final = "ravnest-accepted"
"""Metadata the server answers with once it has let a stream in."""

LINK_KEY: Final = "ravnest-link"
"""Metadata of a call that carries a link: its name."""

LINGER_SECONDS: Final = 10.0
"""How long an ended stream waits for its caller to hang up."""

MAX_STREAMS: Final = 256
"""How many streams one node may have open here, over all its connections. Each costs a task and buffers."""

NODES: Final[tuple[Kind, ...]] = ("node",)

OnTurnedAway = Callable[[TurnedAway], None]
"""Told seldom of connections that took more than their share of a port."""

Context = Any
"""A grpc.aio.ServicerContext of bytes."""

Method = Any
"""A grpc.RpcMethodHandler of bytes."""

MadeT = TypeVar("MadeT", Link, RelayEnd, Control[Any, Any])
RequestT = TypeVar("RequestT", bound=Message)

log = logging.getLogger(__name__)


class CallServer:
    """A gRPC server for one service. Subclasses name its methods with `stream` and `unary`, then `start` it."""

    def __init__(self, keys: Callable[[], TlsKeys], on_turned_away: OnTurnedAway) -> None:
        """`keys` gives what the port shows and trusts; `on_turned_away` is called on the loop that `start` runs on."""
        self._keys = keys
        self._on_turned_away = on_turned_away
        self._door: Doorkeeper | None = None
        self._ends: dict[str, set[ByteStream]] = {}
        self._server: aio.Server | None = None
        self._tasks = BackgroundTasks(_log_error)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, chosen by the system for port 0. RunError when the address cannot be had."""
        assert self._server is None, "a server starts once"
        budgets = budgets_for(raise_descriptor_limit())
        server = aio.server(options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", budgets.incoming)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service(), self.methods()),))
        loop = asyncio.get_running_loop()
        door = Doorkeeper(lambda report: _soon(loop, self._on_turned_away, report))
        bound = bind_port(server, host, port, server_credentials(self._keys, door.knock))
        self._server = server
        await server.start()
        self._door = door
        door.start(host, bound, budgets)
        return bound

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Take no more calls, give those under way `grace_seconds` to end, then break them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)
        if self._door is not None:
            self._door.stop()
        await self._tasks.close()

    def service(self) -> str:
        """Full name of the service."""
        raise NotImplementedError

    def methods(self) -> dict[str, Method]:
        """The methods by name."""
        raise NotImplementedError

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        """Who makes this call; PeerError when it is nobody who may."""
        raise NotImplementedError

    def drop(self, node_id: str, reason: str) -> None:
        """Break every stream of this node; it is told the reason."""
        for stream in list(self._ends.get(node_id, ())):
            stream.fail(RefusedError(reason))

    def stream(
        self,
        name: str,
        make: Callable[[CalledWire], MadeT],
        run: Callable[[str, MadeT], Coroutine[Any, Any, None]],
        kinds: Collection[Kind] = NODES,
    ) -> Method:
        """A method for callers of these kinds: makes the called end of the stream and runs `run(who calls, it)`.

        Who calls is the id of a node, or `invite:ID`.
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
                    raise ValueError(f"it is not there, or larger than {JOIN_BYTES} bytes")
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
            if self._door is not None:
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
    """What a server does with the news unless it is told otherwise."""
    log.warning("%s", report)


def _log_error(error: BaseException) -> None:
    if isinstance(error, RavnestError):
        log.info("a stream ended: %s", error)
    else:
        log.error("a call failed inside this node", exc_info=error)


def _soon(loop: asyncio.AbstractEventLoop, call: OnTurnedAway, report: TurnedAway) -> None:
    # The loop is closed where the process was interrupted meanwhile.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, report)


def _named(identity: Identity) -> str:
    """The id of a node, or `invite:ID`."""
    return identity.name if identity.kind == "node" else f"{identity.kind}:{identity.name}"


def _refusal(handler: "asyncio.Task[Any]") -> PeerError | None:
    """How to end a call whose handler raised: the sentence of our own errors, and for others where to look."""
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
