"""Traffic that measures a lab: one TCP connection at full speed, and small datagrams that are echoed."""

import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tests.wan.lab import LabHost

_BLOCK: Final = bytes(1 << 18)
_PING_TIMEOUT_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Throughput:
    """Payload that a TCP connection delivered."""

    payload_bytes: int
    seconds: float

    @property
    def mbps(self) -> float:
        return self.payload_bytes * 8e-6 / self.seconds


def connect(source: LabHost, target: LabHost, timeout_seconds: float) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between two hosts, both ends in this process. TimeoutError: it was not established in time."""
    with target.open_socket() as listener:
        listener.bind((target.address, 0))
        listener.listen()
        near = source.open_socket()
        near.settimeout(timeout_seconds)
        try:
            near.connect(listener.getsockname())
        except BaseException:
            near.close()
            raise
        far, _ = listener.accept()
        far.settimeout(timeout_seconds)
        return near, far


def throughput(source: LabHost, target: LabHost, seconds: float, warmup_seconds: float = 0.0) -> Throughput:
    """Sends at full speed, and counts the payload that arrives in `seconds` after the warm-up.

    Without a warm-up the result cannot exceed the line's rate. After one it can, by data that had arrived out of order.
    """
    near, far = connect(source, target, timeout_seconds=10)
    started = time.monotonic() + warmup_seconds
    until = started + seconds

    def send() -> None:
        # The receiver ends the connection when it has counted enough.
        with suppress(OSError):
            while True:
                near.sendall(_BLOCK)

    sender = threading.Thread(target=send)
    sender.start()
    block = bytearray(1 << 20)
    received = 0
    try:
        while (now := time.monotonic()) < started:
            far.recv_into(block)
        started = now
        while (now := time.monotonic()) < until:
            received += far.recv_into(block)
    finally:
        far.close()
        with suppress(OSError):  # no longer connected, if the reset of the other end has arrived
            near.shutdown(socket.SHUT_RDWR)
        sender.join()
        near.close()
    return Throughput(received, now - started)


def ping(source: LabHost, target: LabHost, count: int, payload_bytes: int = 32) -> list[float]:
    """Round-trip times in seconds of `count` datagrams, sent one after another, without those that were lost."""
    with source.open_socket(socket.SOCK_DGRAM) as near, target.open_socket(socket.SOCK_DGRAM) as far:
        far.bind((target.address, 0))
        stop = threading.Event()

        def echo() -> None:
            while True:
                data, sender = far.recvfrom(65536)
                if stop.is_set():
                    return
                far.sendto(data, sender)

        echoing = threading.Thread(target=echo, daemon=True)
        echoing.start()
        near.settimeout(_PING_TIMEOUT_SECONDS)
        times = []
        for number in range(count):
            message = number.to_bytes(4, "big").ljust(payload_bytes, b"\0")
            started = time.monotonic()
            near.sendto(message, far.getsockname())
            try:
                while near.recv(65536)[:4] != message[:4]:
                    pass
            except TimeoutError:
                continue
            times.append(time.monotonic() - started)
        stop.set()
        with target.open_socket(socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", far.getsockname())
        echoing.join()
        return times


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3
