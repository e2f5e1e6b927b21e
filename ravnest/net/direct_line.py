"""Direct line: a TCP connection between two nodes for pieces of rings, under the same mutual TLS as everything else.

gRPC copies every byte several times, and a ring moves the whole model. A direct line writes from the memory of one
tensor and reads into that of another. It blocks, so a thread of its own uses it, and it carries pieces in one
direction. A line that breaks is not resumed: the sender goes on over a link.

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

from ravnest.errors import PeerError
from ravnest.net.address import split_address
from ravnest.net.frames.frames import RingPlace
from ravnest.net.identity.identity import node_host
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import TlsKeys
from ravnest.net.pacing.budget import PacedTransfer
from ravnest.net.pacing.traffic_limit import TRAFFIC

MAGIC: Final = b"RVD\x01"
PIECE_BYTES: Final = 4 << 20
"""Maximum size of a piece."""
STALL_SECONDS: Final = 60.0
"""Timeout of a peer that reads nothing in the middle of a piece; the line is broken then."""

_HEADER: Final = struct.Struct("<4sQqIIIIIBI")
_FIRST_BYTES: Final = (16 << 10) - _HEADER.size
"""Bytes of a piece that are sent with its header, in one TLS record. A header alone would be a tiny packet, which tells
congestion control little: after ten seconds of silence, BBR does not take the answer to it as a measurement, and sends
four packets per round trip for 0.2 s to measure again."""

Room = Callable[[int, RingPlace, int], torch.Tensor | None]
"""Returns memory for a piece, given its generation, place and size in bytes."""


class DirectLine:
    """One end of a direct line. One thread may send while another receives; any thread may call `close`."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._header = bytearray(_HEADER.size)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def send(
        self, generation: int, place: RingPlace, data: torch.Tensor, transfer: PacedTransfer | None = None
    ) -> None:
        """Send a piece, which has left this process's memory when this returns. PeerError when the line is broken.

        With a `transfer`, as many bytes at a time as it is the turn of.
        """
        flags = place.donation | place.last << 1
        numbers = (place.ring, place.attempt, place.hop, place.segment, place.chunk)
        header = _HEADER.pack(MAGIC, place.round, generation, *numbers, flags, data.numel())
        memory = _memory(data)
        try:
            with self._in_use():
                self._send_paced(header + memory[:_FIRST_BYTES], transfer)
                start = _FIRST_BYTES
                while start < len(memory):
                    end = len(memory) if transfer is None else start + transfer.piece_bytes
                    self._send_paced(memory[start:end], transfer)
                    start = end
        except (OSError, ValueError) as error:
            raise PeerError(f"the direct line to {self.peer} broke: {error}") from None

    def receive(self, room: Room | None = None) -> tuple[int, RingPlace, torch.Tensor] | None:
        """The next piece, with its generation; None at the end of the line, for any reason. PeerError for an invalid
        piece.

        `room` returns the memory for the bytes. If it returns None, they go to memory that the next piece overwrites.
        """
        if not self._fill(memoryview(self._header)):
            return None
        magic, round, generation, ring, attempt, hop, segment, chunk, flags, size = _HEADER.unpack(self._header)
        if magic != MAGIC or flags > 3 or size > PIECE_BYTES:
            raise PeerError(f"{self.peer} sent {size} bytes over a direct line that are not a piece of a ring")
        place = RingPlace(round, ring, attempt, hop, segment, chunk, bool(flags & 1), bool(flags & 2))
        data = torch.empty(size, dtype=torch.uint8) if room is None else room(generation, place, size)
        if data is None:
            data = self._temporary(size)
        if size and not self._fill(_memory(data)):
            return None
        return generation, place, data

    def close(self) -> None:
        """End the line at once; threads in `receive` and `send` return."""
        with self._lock:
            self._closed = True
            # Wakes threads that wait. Calls the shutdown of the plain socket, because after SSLSocket's own shutdown
            # other threads would read and write the unencrypted connection.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()

    def handshake(self) -> bytes:
        """Run the called side's part of the handshake. Returns the certificate of the peer. OSError if the handshake
        fails."""
        assert isinstance(self._socket, ssl.SSLSocket)
        with self._in_use():
            self._socket.do_handshake()
            return self._socket.getpeercert(binary_form=True) or b""

    def _send_paced(self, data: bytes | memoryview, transfer: PacedTransfer | None) -> None:
        if transfer is not None:
            transfer.wait_turn(len(data), lambda: self._closed)
        TRAFFIC.sent.wait_turn(len(data), lambda: self._closed)
        self._socket.sendall(data)

    def _temporary(self, size: int) -> torch.Tensor:
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
                    TRAFFIC.received.wait_turn(received, lambda: self._closed)
        except (OSError, ValueError):
            return False
        return True

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The last user of the connection closes it, because its descriptor may belong to another file afterwards."""
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


def dial_direct(address: str, node_id: str, node: NodeIdentity, timeout_seconds: float) -> DirectLine:
    """A line to the node of this id, which listens at `address`. PeerError when there is no way to make one."""
    return DirectLine(connect_direct(address, node_id, node.tls_keys(), timeout_seconds), node_id)


def connect_direct(address: str, node_id: str, keys: TlsKeys, timeout_seconds: float) -> ssl.SSLSocket:
    """The connection under such a line."""
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host.strip("[]"), port), timeout=timeout_seconds)
        try:
            context = tls_context(ssl.PROTOCOL_TLS_CLIENT, keys)
            secured = context.wrap_socket(connection, server_hostname=node_host(node_id))
            tune(secured)
            return secured
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError) as error:
        raise PeerError(f"there is no direct line to {node_id} at {address}: {error}") from None


def tls_context(protocol: int, keys: TlsKeys) -> ssl.SSLContext:
    """TLS 1.3 with these keys, for either end of a line."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=keys.roots.decode())
    # The library reads keys only from files, so this file exists briefly, readable by this user alone.
    with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:
        path = Path(folder, "keys.pem")
        path.touch(mode=0o600)
        path.write_bytes(keys.key + keys.certificate)
        context.load_cert_chain(path)
    return context


def tune(connection: socket.socket) -> None:
    """Set the options of an established connection: no delay, and the timeouts."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # This timeout is for data that was sent and is not read, because an idle line may be silent for any time. It is the
    # system's timeout: Python's own would split each piece into many calls, and after SO_SNDTIMEO Python's ssl tries
    # again.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_SECONDS))
    connection.settimeout(None)


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # the stubs do not say that arrays are buffers
