"""Direct lines without TLS, for a comparison with peers that use none. The product itself always uses TLS."""

import socket
from collections.abc import Callable
from typing import Any, cast

from ravnest.net.address import split_address
from ravnest.net.direct_line import DirectLine
from ravnest.net.direct_server import DirectServer
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.provider.rings import sender


class PlaintextServer(DirectServer):
    """Accepts every caller as `peer`."""

    def __init__(
        self, peer: str, node: NodeIdentity, may_send: Callable[[str], bool], take: Callable[[DirectLine], None]
    ) -> None:
        super().__init__(node, may_send, take)
        self._always = peer

    def secure(self, connection: socket.socket) -> Any:
        return connection

    def identify_caller(self, line: DirectLine) -> str:
        return self._always


def use_plaintext() -> None:
    """Make all further outgoing lines of this process plaintext."""
    setattr(sender, "dial_direct", _dial_plaintext)  # noqa: B010  # the module does not export it


def _dial_plaintext(address: str, node_id: str, node: NodeIdentity, timeout_seconds: float) -> DirectLine:
    host, port = split_address(address)
    connection = socket.create_connection((host, port), timeout=timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    return DirectLine(cast(Any, connection), node_id)
