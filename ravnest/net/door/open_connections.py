"""Connections that gRPC has accepted on one port, found among the open files of this process.

gRPC does not list them. The system does: each is an open socket whose own end is the port.
"""

import contextlib
import os
import socket
import stat
import struct
import sys
from dataclasses import dataclass
from typing import Final

from ravnest.net.address import plain_host

Peer = tuple[str, int]
"""Address and port of the other end."""

_OPEN_FILES: Final = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_BYTES_RECEIVED: Final = struct.Struct("=Q")
_BYTES_RECEIVED_AT: Final = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`, since 4.1."""


@dataclass(frozen=True, slots=True)
class Found:
    """A connection among the open files."""

    descriptor: int
    number: int
    """The inode of the socket, which no other socket has while this one is open."""
    has_spoken: bool
    """Whether a byte has come over it."""


class OpenConnections:
    """The connections to one port of this process, found among its open files."""

    def __init__(self, host: str, port: int) -> None:
        """`host` is empty if the port is open at every address."""
        self._host = host
        self._port = port
        self._files: dict[int, tuple[int, Peer | None]] = {}
        """By descriptor: the inode of the socket, which tells it from a later one, and its peer if it is a connection
        to the port. Known sockets are not asked again: each question releases Python's lock, and a busy process takes
        milliseconds to return it."""
        self._spoken: set[int] = set()

    def look(self) -> dict[Peer, Found]:
        """The connections that are open now. OSError when no descriptor is left to look with."""
        files: dict[int, tuple[int, Peer | None]] = {}
        for name in os.listdir(_OPEN_FILES):
            descriptor = int(name)
            with contextlib.suppress(OSError):
                found = os.fstat(descriptor)
                if stat.S_ISSOCK(found.st_mode):
                    known = self._files.get(descriptor)
                    if known is None or known[0] != found.st_ino:
                        known = found.st_ino, self._peer(descriptor)
                    files[descriptor] = known
        self._files = files
        self._spoken &= {number for number, _ in files.values()}
        return {
            peer: Found(descriptor, number, self._has_spoken(descriptor, number))
            for descriptor, (number, peer) in files.items()
            if peer is not None
        }

    def shut_down(self, found: Found) -> None:
        """End a connection, if it is still open. gRPC reads the end and closes the socket."""
        with contextlib.suppress(OSError):
            copy = os.dup(found.descriptor)
            if os.fstat(copy).st_ino != found.number:
                # The descriptor belongs to another file by now. The copy stays open, because closing it would release
                # the locks that this process may have on that file.
                return
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _peer(self, descriptor: int) -> Peer | None:
        """The other end, if this is a connection to the port."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                here, there = connection.getsockname(), connection.getpeername()
                if here[1] == self._port and (not self._host or plain_host(here[0]) == self._host):
                    return plain_host(there[0]), there[1]
            return None
        except OSError:
            # The socket listens, or its connection has just ended: it has no other end.
            return None
        finally:
            connection.detach()

    def _has_spoken(self, descriptor: int, number: int) -> bool:
        """Whether a byte has come over it; True if the system does not tell."""
        if _TCP_INFO is None or number in self._spoken:
            return True
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return True
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size)
            has_spoken = bool(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])
        except (OSError, struct.error):
            # The connection has ended, or the kernel is too old to tell: the other timeouts apply.
            has_spoken = True
        finally:
            connection.detach()
        if has_spoken:
            self._spoken.add(number)
        return has_spoken
