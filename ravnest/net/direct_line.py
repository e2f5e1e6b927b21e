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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from ravnest.errors import PeerError, RunError
from ravnest.net.address import split_address
from ravnest.net.connection import bind_refusal
from ravnest.net.frames.frames import RingPlace
from ravnest.net.identity.certificates import read_certificate
from ravnest.net.identity.identity import node_host
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import TlsKeys

MAGIC: Final = b"RVD\x01"
PIECE_BYTES: Final = 4 << 20
"""The largest piece that is taken."""
HANDSHAKE_SECONDS: Final = 10.0
STALL_SECONDS: Final = 60.0
"""How long a peer may take nothing, in the middle of a piece, before the line counts as broken."""
_WAITING: Final = 16
"""Connections that may be in the middle of their handshake. One more takes the place of the oldest, so that callers who
say nothing do not keep an owner out that is through with its handshake in a moment."""
_LINES_PER_NODE: Final = 16
"""An owner has one line to here, and dead ones of a connection that broke."""
_PAUSE_SECONDS: Final = 0.1
"""Before the next try to accept where the system refuses, for want of file descriptors say."""

_HEADER: Final = struct.Struct("<4sQqIIIIIBI")
_FIRST_BYTES: Final = (16 << 10) - _HEADER.size
"""Of a piece, what goes with its header, in one TLS record. A header that went ahead would be a packet of its own, and
one that has nearly nothing in it tells the system little: after ten seconds of silence BBR takes the answer to it as no
measure of the line, and sends four packets a round trip for 0.2 s to measure it anew."""


Room = Callable[[int, RingPlace, int], torch.Tensor | None]
"""Memory for a piece: of which generation and place, and of how many bytes it is."""


class DirectLine:
    """One end of a connection. One thread may send while another receives; `close` may come from anywhere."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._header = bytearray(_HEADER.size)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def send(self, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        """Sends a piece, whose bytes have left this process's memory when it returns. PeerError when the line broke."""
        flags = place.donation | place.last << 1
        numbers = (place.ring, place.attempt, place.hop, place.segment, place.chunk)
        header = _HEADER.pack(MAGIC, place.round, generation, *numbers, flags, data.numel())
        memory = _memory(data)
        try:
            with self._in_use():
                self._socket.sendall(header + memory[:_FIRST_BYTES])
                if len(memory) > _FIRST_BYTES:
                    self._socket.sendall(memory[_FIRST_BYTES:])
        except (OSError, ValueError) as error:
            raise PeerError(f"the direct line to {self.peer} broke: {error}") from None

    def receive(self, room: Room | None = None) -> tuple[int, RingPlace, torch.Tensor] | None:
        """The next piece, with its generation; None at the end of the line, however it came. PeerError for what is no
        piece.

        `room` says where its bytes are to go; where it says None, they lie in memory that the next piece overwrites.
        """
        if not self._fill(memoryview(self._header)):
            return None
        magic, round, generation, ring, attempt, hop, segment, chunk, flags, size = _HEADER.unpack(self._header)
        if magic != MAGIC or flags > 3 or size > PIECE_BYTES:
            raise PeerError(f"{self.peer} sent {size} bytes that are no piece of a ring over a direct line")
        place = RingPlace(round, ring, attempt, hop, segment, chunk, bool(flags & 1), bool(flags & 2))
        data = torch.empty(size, dtype=torch.uint8) if room is None else room(generation, place, size)
        if data is None:
            data = self._for_now(size)
        if size and not self._fill(_memory(data)):
            return None
        return generation, place, data

    def close(self) -> None:
        """Ends the line at once; whoever is in `receive` or `send` returns."""
        with self._lock:
            self._closed = True
            # Wakes whoever waits on another thread. Past SSLSocket's own, after which others would read and write the
            # bare connection.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()

    def handshake(self) -> bytes:
        """Makes the called side's part of the handshake; the certificate that the peer shows. OSError if it fails."""
        assert isinstance(self._socket, ssl.SSLSocket)
        with self._in_use():
            self._socket.do_handshake()
            return self._socket.getpeercert(binary_form=True) or b""

    def _for_now(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def _fill(self, memory: memoryview) -> bool:
        try:
            with self._in_use():
                while memory:
                    received = self._socket.recv_into(memory)
                    if not received:
                        return False
                    memory = memory[received:]
        except (OSError, ValueError):
            return False
        return True

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Whoever uses the connection last closes it: its number may be another file's from then on."""
        with self._lock:
            if self._closed:
                raise OSError("it was closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._socket.close()


class DirectServer:
    """Listens for direct lines of nodes that may send here; each is handed to `take`, on a thread of its own.

    `may_send` says which nodes that are. Strangers are refused at the handshake, others hung up on.
    """

    def __init__(self, node: NodeIdentity, may_send: Callable[[str], bool], take: Callable[[DirectLine], None]) -> None:
        self._node = node
        self._may_send = may_send
        self._take = take
        self._lock = threading.Lock()
        self._open: set[DirectLine] = set()
        self._stopped = threading.Event()
        self._greeting: dict[int, socket.socket] = {}
        """Connections in the middle of their handshake, the oldest first, by a number of their own."""
        self._accepted = 0
        self._listening: socket.socket | None = None
        self._keys: TlsKeys | None = None
        self._context: ssl.SSLContext | None = None

    def start(self, host: str, port: int) -> int:
        """Listens there, or at another port of the same host where that is taken; the port. RunError for no port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As bind_refusal does: a port that was left a moment ago is free.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
        with self._lock:
            self._stopped.set()
            lines = list(self._open)
        if self._listening is not None:
            with contextlib.suppress(OSError):
                # Wakes the thread that accepts, which closing alone does not.
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
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
                oldest = list(self._greeting.values())[: max(0, len(self._greeting) + 1 - _WAITING)]
                for one in oldest:
                    with contextlib.suppress(OSError):
                        # Its thread closes it. The end of the bare connection, which its TLS is made on, is enough.
                        socket.socket.shutdown(one, socket.SHUT_RDWR)
                self._greeting[self._accepted] = connection
            arguments = (connection, self._accepted)
            threading.Thread(target=self._serve, args=arguments, name="ravnest-direct", daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError, PeerError):
            stack.callback(connection.close)
            try:
                connection.settimeout(HANDSHAKE_SECONDS)
                secured = self._secured(connection)
                with self._lock:
                    self._greeting[number] = secured
                line = DirectLine(secured, "a caller")
                stack.callback(self._forget, line)
                with self._lock:
                    if self._stopped.is_set():
                        return
                    self._open.add(line)
                line.peer = self._greeted(line)
                with self._lock:
                    if sum(open_line.peer == line.peer for open_line in self._open) > _LINES_PER_NODE:
                        return
            finally:
                with self._lock:
                    del self._greeting[number]
            _tune(secured)
            self._take(line)

    def _forget(self, line: DirectLine) -> None:
        with self._lock:
            self._open.discard(line)
        line.close()

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Takes the connection over. The handshake is still to be made."""
        keys = self._node.tls_keys()
        if self._context is None or keys != self._keys:
            context = _context(ssl.PROTOCOL_TLS_SERVER, keys)
            # Who only sends never reads them; and closing with something unread would drop what is still on its way.
            context.num_tickets = 0
            self._context, self._keys = context, keys
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _greeted(self, line: DirectLine) -> str:
        """Who has called. OSError or PeerError when it is nobody who may."""
        identity = self._node.identify(read_certificate(line.handshake()))
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
            secured = context.wrap_socket(connection, server_hostname=node_host(node_id))
            _tune(secured)
            return DirectLine(secured, node_id)
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


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # For what was sent and is not taken: between pieces a line may be silent without end. It is the system's limit, not
    # Python's, which would make many calls of every piece; and not SO_SNDTIMEO, after which Python's ssl tries again.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_SECONDS))
    connection.settimeout(None)


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # the stubs do not say that arrays are buffers
