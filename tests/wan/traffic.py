"""Traffic to measure a lab with: one TCP connection as fast as it goes, and small datagrams there and back."""

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
    """What a TCP connection brought to the far end."""

    payload_bytes: int
    seconds: float

    @property
    def mbps(self) -> float:
        return self.payload_bytes * 8e-6 / self.seconds


def connect(source: LabHost, target: LabHost, timeout_seconds: float) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between two hosts, both ends in this process. TimeoutError when it does not come about."""
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
    """Sends as fast as it goes, and counts what arrives in `seconds` once the warm-up is over.

    Without a warm-up the result cannot exceed the line's rate. After one it can, by what had come out of order before.
    """
    near, far = connect(source, target, timeout_seconds=10)
    started = time.monotonic() + warmup_seconds
    until = started + seconds

    def send() -> None:
        # The connection ends when the receiver has seen enough.
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
        with suppress(OSError):  # not connected any more, where the far end's reset has come already
            near.shutdown(socket.SHUT_RDWR)
        sender.join()
        near.close()
    return Throughput(received, now - started)


def ping(source: LabHost, target: LabHost, count: int, payload_bytes: int = 32) -> list[float]:
    """Round-trip times in seconds of those of `count` datagrams that came back, one after another."""
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
