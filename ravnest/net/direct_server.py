"""Server of direct lines: accepts the connections of nodes that may send pieces of rings to this one.

Callers that are not of the swarm are refused in the TLS handshake, and nodes that may not send are disconnected.
"""

import contextlib
import functools
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ravnest.errors import PeerError, RunError
from ravnest.net.address import bind_refusal
from ravnest.net.direct_line import DirectLine, tls_context, tune
from ravnest.net.identity.certificates import read_certificate
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import TlsKeys

HANDSHAKE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1
"""Pause after the system refuses to accept a connection, for example because no file descriptor is left."""


@dataclass(frozen=True, slots=True)
class DirectLimits:
    """Limits on the callers of a server of direct lines."""

    handshaking: int = 16
    """Connections in their handshake. One more replaces the oldest, so that silent callers do not keep an owner out,
    which completes its handshake at once."""
    handshake_seconds: float = HANDSHAKE_SECONDS
    """Timeout of the handshake."""
    lines_per_node: int = 16
    """An owner has one line to this node, and dead ones after a connection broke."""


class DirectServer:
    """Listens for direct lines, and passes each one to `take`, on a thread of its own.

    `may_send` tells whether a node may send here. Callers that are not of the swarm are refused in the handshake, and
    other nodes are disconnected.
    """

    def __init__(
        self,
        node: NodeIdentity,
        may_send: Callable[[str], bool],
        take: Callable[[DirectLine], None],
        limits: DirectLimits | None = None,
    ) -> None:
        self._node = node
        self._limits = limits or DirectLimits()
        self._may_send = may_send
        self._take = take
        self._lock = threading.Lock()
        self._open: set[DirectLine] = set()
        self._stopped = threading.Event()
        self._greeting: dict[int, socket.socket] = {}
        """Connections in their handshake, the oldest first, by a number of their own."""
        self._accepted = 0
        self._port = contextlib.ExitStack()
        """Closes the port."""

    def start(self, host: str, port: int) -> int:
        """Listen at this port, or at another port of the host if it is taken. Returns the port. RunError when there is
        none."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As in bind_refusal: a port that was closed a moment ago is free.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host.strip("[]"), port if port and not bind_refusal(host, port) else 0))
            listening.listen(self._limits.handshaking)
        except OSError as error:
            listening.close()
            raise RunError(f"cannot listen on {host} for direct lines: {error.strerror or error}") from None
        self._port.callback(_close_port, listening)
        threading.Thread(target=self._accept, args=(listening,), name="ravnest-direct", daemon=True).start()
        return int(listening.getsockname()[1])

    def stop(self) -> None:
        """End all lines, and stop listening."""
        with self._lock:
            self._stopped.set()
            lines = list(self._open)
        self._port.close()
        for line in lines:
            line.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                self._stopped.wait(_PAUSE_SECONDS)
                continue
            self._accepted += 1
            with self._lock:
                oldest = list(self._greeting.values())[: max(0, len(self._greeting) + 1 - self._limits.handshaking)]
                for one in oldest:
                    with contextlib.suppress(OSError):
                        # Its thread closes it. Shutting down the plain connection under TLS is enough.
                        socket.socket.shutdown(one, socket.SHUT_RDWR)
                self._greeting[self._accepted] = connection
            arguments = (connection, self._accepted)
            threading.Thread(target=self._serve, args=arguments, name="ravnest-direct", daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError, PeerError):
            stack.callback(connection.close)
            try:
                connection.settimeout(self._limits.handshake_seconds)
                secured = self.secure(connection)
                with self._lock:
                    self._greeting[number] = secured
                line = DirectLine(secured, "a caller")
                stack.callback(self._forget, line)
                with self._lock:
                    if self._stopped.is_set():
                        return
                    self._open.add(line)
                line.peer = self.identify_caller(line)
                with self._lock:
                    if sum(open_line.peer == line.peer for open_line in self._open) > self._limits.lines_per_node:
                        return
            finally:
                with self._lock:
                    del self._greeting[number]
            tune(secured)
            self._take(line)

    def _forget(self, line: DirectLine) -> None:
        with self._lock:
            self._open.discard(line)
        line.close()

    def secure(self, connection: socket.socket) -> socket.socket:
        """Wrap the connection in TLS, before the handshake."""
        context = _server_context(self._node.tls_keys())
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def identify_caller(self, line: DirectLine) -> str:
        """The id of the caller. OSError or PeerError when it may not send here."""
        identity = self._node.identify(read_certificate(line.handshake()))
        if identity.kind != "node" or not self._may_send(identity.name):
            raise PeerError(f"{identity} may not send pieces of rings here")
        return identity.name


@functools.lru_cache(maxsize=1)
def _server_context(keys: TlsKeys) -> ssl.SSLContext:
    context = tls_context(ssl.PROTOCOL_TLS_SERVER, keys)
    # The dialling side only sends, so it never reads tickets, and closing with unread data would drop data on its way.
    context.num_tickets = 0
    return context


def _close_port(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Wakes the thread that accepts, which closing alone does not.
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
