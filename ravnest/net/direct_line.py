"""Direct lines: a TCP connection between two nodes for pieces of rings, under the same mutual TLS as everything else.

gRPC copies every byte several times on its way; a ring moves the whole model. A direct line writes from the memory of a
tensor and reads into that of another. It is blocking, for a thread that does nothing else, carries pieces one way, and
is not taken up again when it breaks: whoever sends goes on over a link then.

    piece     header, then `size` bytes
    header    "RVD" and the format version (1), round, generation, ring, attempt, hop, segment, chunk, flags, size;
              little-endian, see _HEADER. Flags: 1 donation, 2 last
"""

import contextlib
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from ravnest.errors import PeerError, RunError
from ravnest.net.address import split_address
from ravnest.net.certificates import read_certificate
from ravnest.net.connection import bind_refusal
from ravnest.net.frames import RingPlace
from ravnest.net.identity import node_host
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.tls import TlsKeys

MAGIC: Final = b"RVD\x01"
PIECE_BYTES: Final = 4 << 20
"""The largest piece that is taken."""
HANDSHAKE_SECONDS: Final = 10.0
STALL_SECONDS: Final = 60.0
"""How long a peer may take nothing, in the middle of a piece, before the line counts as broken."""
_WAITING: Final = 16
"""Connections that may be in the middle of their handshake: more are hung up on."""

_HEADER: Final = struct.Struct("<4sQqIIIIIBI")


class DirectLine:
    """One end of a connection. One thread may send while another receives; `close` may come from anywhere."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._header = bytearray(_HEADER.size)

    def send(self, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        """Sends a piece, whose bytes have left this process's memory when it returns. PeerError when the line broke."""
        flags = place.donation | place.last << 1
        numbers = (place.ring, place.attempt, place.hop, place.segment, place.chunk)
        header = _HEADER.pack(MAGIC, place.round, generation, *numbers, flags, data.numel())
        try:
            self._socket.sendall(header)
            self._socket.sendall(_memory(data))
        except (OSError, ValueError) as error:
            raise PeerError(f"the direct line to {self.peer} broke: {error}") from None

    def receive(self) -> tuple[int, RingPlace, torch.Tensor] | None:
        """The next piece, with its generation; None at the end of the line, however it came. PeerError for what is no
        piece."""
        if not self._fill(memoryview(self._header)):
            return None
        magic, round, generation, ring, attempt, hop, segment, chunk, flags, size = _HEADER.unpack(self._header)
        if magic != MAGIC or flags > 3 or size > PIECE_BYTES:
            raise PeerError(f"{self.peer} sent {size} bytes that are no piece of a ring over a direct line")
        data = torch.empty(size, dtype=torch.uint8)
        if not self._fill(_memory(data)):
            return None
        place = RingPlace(round, ring, attempt, hop, segment, chunk, bool(flags & 1), bool(flags & 2))
        return generation, place, data

    def close(self) -> None:
        """Ends the line at once; whoever is in `receive` or `send` returns."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, memory: memoryview) -> bool:
        while memory:
            try:
                received = self._socket.recv_into(memory)
            except (OSError, ValueError):
                return False
            if not received:
                return False
            memory = memory[received:]
        return True


class DirectServer:
    """Listens for direct lines of nodes that may send here; each is handed to `take`, on a thread of its own.

    `may_send` says which nodes that are. Strangers are refused at the handshake, others hung up on.
    """

    def __init__(self, node: NodeIdentity, may_send: Callable[[str], bool], take: Callable[[DirectLine], None]) -> None:
        self._node = node
        self._may_send = may_send
        self._take = take
        self._lock = threading.Lock()
        self._lines: set[DirectLine] = set()
        self._handshakes = threading.BoundedSemaphore(_WAITING)
        self._listening: socket.socket | None = None
        self._keys: TlsKeys | None = None
        self._context: ssl.SSLContext | None = None

    def start(self, host: str, port: int) -> int:
        """Listens there, or at another port of the same host where that is taken; the port. RunError for no port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((host.strip("[]"), port if port and not bind_refusal(host, port) else 0))
            listening.listen(_WAITING)
        except OSError as error:
            listening.close()
            raise RunError(f"cannot listen on {host} for direct lines: {error.strerror or error}") from None
        self._listening = listening
        threading.Thread(target=self._accept, args=(listening,), name="ravnest-direct", daemon=True).start()
        return int(listening.getsockname()[1])

    def stop(self) -> None:
        """Ends everything that was accepted, and listens no more."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.close()

    def _accept(self, listening: socket.socket) -> None:
        while self._listening is listening:
            try:
                connection, _ = listening.accept()
            except OSError:
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="ravnest-direct", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line: DirectLine | None = None
        try:
            try:
                connection.settimeout(HANDSHAKE_SECONDS)
                secured = self._secured(connection)
                peer = self._peer(secured)
            finally:
                self._handshakes.release()
            line = DirectLine(_tuned(secured, None), peer)
            with self._lock:
                self._lines.add(line)
            if self._listening is not None:
                self._take(line)
        except (OSError, PeerError):
            pass
        finally:
            if line is not None:
                with self._lock:
                    self._lines.discard(line)
                line.close()
            connection.close()

    def _secured(self, connection: socket.socket) -> socket.socket:
        keys = self._node.tls_keys()
        if self._context is None or keys != self._keys:
            self._context, self._keys = _context(ssl.PROTOCOL_TLS_SERVER, keys), keys
        return self._context.wrap_socket(connection, server_side=True)

    def _peer(self, secured: socket.socket) -> str:
        assert isinstance(secured, ssl.SSLSocket)
        shown = secured.getpeercert(binary_form=True)
        identity = self._node.identify(read_certificate(shown or b""))
        if identity.kind != "node" or not self._may_send(identity.name):
            raise PeerError(f"{identity} may not send pieces of rings here")
        return identity.name


def dial_direct(address: str, node_id: str, node: NodeIdentity, timeout_seconds: float) -> DirectLine:
    """A line to the node of this id, which listens for them at `address`. PeerError when it cannot be had."""
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host.strip("[]"), port), timeout=timeout_seconds)
        try:
            context = _context(ssl.PROTOCOL_TLS_CLIENT, node.tls_keys())
            return DirectLine(_tuned(context.wrap_socket(connection, server_hostname=node_host(node_id))), node_id)
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError) as error:
        raise PeerError(f"there is no direct line to {node_id} at {address}: {error}") from None


def _context(protocol: int, keys: TlsKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=keys.roots.decode())
    # The library takes keys from files alone: one that only this user may read, for as long as it takes.
    with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:
        path = Path(folder, "keys.pem")
        path.touch(mode=0o600)
        path.write_bytes(keys.key + keys.certificate)
        context.load_cert_chain(path)
    return context


def _tuned(connection: socket.socket, timeout_seconds: float | None = STALL_SECONDS) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.settimeout(timeout_seconds)
    return connection


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # the stubs do not say that arrays are buffers
