"""Throughput of a line without Ravnest: one TCP connection, full in both directions, for some seconds.

    python -m benchmarks.pipeline_parts.tcp_line listen PORT SECONDS               prints the received bytes per second
    python -m benchmarks.pipeline_parts.tcp_line dial HOST:PORT SECONDS            the same for the other direction

It is an upper bound for Ravnest: it includes the moments at which congestion control sends next to nothing, or loses
packets at a full queue.
"""

import json
import socket
import sys
import threading
import time
from typing import Final

_WARM_SECONDS: Final = 5.0
"""Warm-up, in which congestion control finds the line's rate."""
_PATIENCE_SECONDS: Final = 20.0
_CHUNK: Final = bytes(1 << 18)


def main() -> None:
    role, where, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    connection = _accepted(int(where)) if role == "listen" else _dialled(where)
    connection.settimeout(_PATIENCE_SECONDS)
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    began, counted = time.monotonic(), 0
    first = last = 0.0
    memory = bytearray(1 << 20)
    while (now := time.monotonic()) < began + _WARM_SECONDS + seconds:
        size = connection.recv_into(memory)
        if now >= began + _WARM_SECONDS:
            first, last = first or now, time.monotonic()
            counted += size
    print(json.dumps(counted / (last - first)), flush=True)
    # The other end may still be counting, so the connection must not be reset.
    sys.stdin.read()


def _accepted(port: int) -> socket.socket:
    with socket.create_server(("", port)) as listening:
        listening.settimeout(_PATIENCE_SECONDS)
        return listening.accept()[0]


def _dialled(where: str) -> socket.socket:
    host, port = where.rsplit(":", 1)
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=1.0)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _send(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(_CHUNK)
    except OSError:
        pass  # The other end has closed: the measurement is over.


if __name__ == "__main__":
    main()
