"""Callers that take connections and prove nothing, from a thread of the test's own process or from another process.

`python -m tests.adversary.floods HOST PORT CONNECTIONS` is such a process: it says `open` when its connections are, and
how many were ended by the other side when its standard input is closed.
"""

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from ravnest.net.door.descriptors import raise_descriptor_limit

ROOT: Final = Path(__file__).parents[2]

_REOPENED: Final = 20
_PAUSE_SECONDS: Final = 0.1

Place = tuple[str, int]


class Flood:
    """Keeps so many connections open; of those that are closed it opens some again, ten times a second."""

    def __init__(self, place: Place, connections: int, say: Callable[[socket.socket], None] = lambda _: None) -> None:
        """`say` is called now and then with each connection that is open."""
        assert raise_descriptor_limit() > connections + 256, "this machine lets the test open too few connections"
        self._place = place
        self._say = say
        self._ended = threading.Event()
        self._open = [connection for _ in range(connections) if (connection := self._connect()) is not None]
        self._wanted = connections
        self.refused = connections - len(self._open)
        """Connections that the other side has ended."""
        self._thread = threading.Thread(target=self._keep_up, name="flood")
        self._thread.start()

    @property
    def open(self) -> int:
        return len(self._open)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        for connection in self._open:
            connection.close()

    def _keep_up(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            left = [connection for connection in self._open if _is_open(connection)]
            self.refused += len(self._open) - len(left)
            for connection in left:
                with contextlib.suppress(OSError):
                    self._say(connection)
            for _ in range(min(_REOPENED, self._wanted - len(left))):
                connection = self._connect()
                if connection is not None:
                    left.append(connection)
            self._open = left

    def _connect(self) -> socket.socket | None:
        try:
            connection = socket.create_connection(self._place, timeout=5)
        except OSError:
            return None
        connection.setblocking(False)
        return connection


def _is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


@contextmanager
def flooding(place: Place, connections: int, say: Callable[[socket.socket], None] = lambda _: None) -> Iterator[Flood]:
    """A flood for as long as the block lasts."""
    flood = Flood(place, connections, say)
    try:
        yield flood
    finally:
        flood.stop()


class FloodProcess:
    """A flood of silent connections from another process: so many would not leave a test the descriptors it needs."""

    def __init__(self, place: Place, connections: int) -> None:
        command = [sys.executable, "-m", "tests.adversary.floods", place[0], str(place[1]), str(connections)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.refused = 0
        """Connections that the other side has ended, once the flood is over."""

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "open\n"
        return self

    def __exit__(self, *_: object) -> None:
        said, _ = self._process.communicate()
        self.refused = int(said)


class Trickle:
    """Says one byte more of a greeting that never ends: the header of a TLS record of 16 KiB, and zeros."""

    def __init__(self) -> None:
        self._begun: set[Place] = set()

    def __call__(self, connection: socket.socket) -> None:
        place = connection.getsockname()
        connection.send(b"\x00" if place in self._begun else b"\x16\x03\x01\x40\x00")
        self._begun.add(place)


def shake_hands(place: Place, certificate_file: str) -> None:
    """Makes a TLS handshake with this certificate, as far as the other side lets it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(certificate_file)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(place, timeout=5) as plain,
        context.wrap_socket(plain) as secured,
    ):
        # In TLS 1.3 the refusal of a certificate comes after one's own side is done.
        secured.recv(1)


def main() -> None:
    host, port, connections = sys.argv[1:]
    with flooding((host, int(port)), int(connections)) as flood:
        print("open", flush=True)
        sys.stdin.read()
    print(flood.refused, flush=True)


if __name__ == "__main__":
    main()
