"""Sender and receiver of benchmarks/transport.py, each in a process of its own.

    python -m benchmarks.transport_ends receive bare|ravnest FOLDER HOST            prints its port, serves until killed
    python -m benchmarks.transport_ends send bare|ravnest FOLDER HOST:PORT MESSAGES BYTES       prints bytes per second
    python -m benchmarks.transport_ends send both FOLDER HOST:PORT SECONDS BYTES       prints those of both directions

`bare` is grpc.aio alone: a stream of byte messages over the same mutual TLS. The rate is the receiver's, from the
arrival of the first message to that of the last. `both` sends in both directions at the same time, like two stages, and
counts the bytes that arrive within some seconds after a warm-up.
"""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc import aio

from ravnest.errors import PeerError
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.certificates import read_certificate
from ravnest.net.identity.identity import node_host
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.tls import channel_credentials, expecting, server_credentials
from ravnest.net.rpc.client import dial_link
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink

SENDER, RECEIVER, AUTHORITY = "sender", "receiver", "authority.pem"
_METHOD = "/bare.Bare/Send"
_LIMIT = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
_END = b"end"
_BOTH = "both:"
_AHEAD_BYTES = 8 << 20
_WARMUP_SECONDS = 4.0


class Meter:
    """Counts received bytes."""

    def __init__(self) -> None:
        self.bytes, self.first, self.last = 0, 0.0, 0.0

    def arrived(self, size: int) -> None:
        self.last = time.perf_counter()
        if self.first:
            self.bytes += size
        else:
            self.first = self.last

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / (self.last - self.first)


class Window:
    """Counts the bytes that arrive within this many seconds after a warm-up."""

    def __init__(self, seconds: float, warmup_seconds: float) -> None:
        self._seconds, self._warmup = seconds, warmup_seconds
        self._first = self._began = 0.0
        self._bytes = 0
        self.bytes_per_second = 0.0

    def arrived(self, size: int) -> bool:
        """Record a message; returns whether it was the last one that counts."""
        now = time.perf_counter()
        self._first = self._first or now
        if now < self._first + self._warmup:
            return False
        if not self._began:
            self._began = now
            return False
        self._bytes += size
        self.bytes_per_second = self._bytes / (now - self._began)
        return now > self._began + self._seconds


class _Provider:
    async def link(self, peer: str, connection: Link) -> None:
        if connection.label.startswith(_BOTH):
            seconds, size = map(int, connection.label.removeprefix(_BOTH).split(","))
            link = ResumableLink(peer, _AHEAD_BYTES)
            await asyncio.gather(link.carry(connection), _stream(link, seconds, size))
            return
        link, meter = ResumableLink(peer), Meter()
        carrying = asyncio.create_task(link.carry(connection))
        while (frame := await link.receive()) is not None:
            if frame.marks.flush:
                rate = {"bytes_per_second": meter.bytes_per_second}
                await link.send(Frame(FrameKind.DONE, frame.microbatch, scalars=rate))
            else:
                meter.arrived(frame.tensors["x"].nbytes)
        await carrying


async def receive(kind: str, folder: Path, host: str) -> None:
    node = _node(folder, RECEIVER)
    if kind in ("ravnest", "both"):
        ours = ProviderServer(_Provider(), node)
        ours.neighbours = {SENDER}
        print(await ours.start(host, 0), flush=True)
    else:

        async def serve(messages: Any, context: Any) -> Any:
            meter = Meter()
            async for message in messages:
                if message == _END:
                    yield json.dumps(meter.bytes_per_second).encode()
                else:
                    meter.arrived(len(message))

        bare = aio.server(options=_LIMIT)
        methods: dict[str, Any] = {"Send": grpc.stream_stream_rpc_method_handler(serve)}
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", methods),))
        print(bare.add_secure_port(f"{host}:0", server_credentials(node.tls_keys)), flush=True)
        await bare.start()
    await asyncio.Event().wait()


async def _stream(link: ResumableLink, seconds: int, size: int) -> tuple[float, float]:
    """Send frames for this many seconds; returns the rate received here and the rate that the other end reports."""
    window, here, there = Window(seconds, _WARMUP_SECONDS), 0.0, 0.0
    tensor = torch.ones(size // 4)

    async def send_all() -> None:
        for number in itertools.count():
            rate = {"bytes_per_second": here} if here else {}
            await link.send(Frame(FrameKind.FORWARD, number, tensors={"x": tensor}, scalars=rate))

    sending = asyncio.create_task(send_all())
    try:
        while not (here and there):
            frame = await link.receive()
            assert frame is not None
            if window.arrived(frame.tensors["x"].nbytes):
                here = here or window.bytes_per_second
            there = float(frame.scalars.get("bytes_per_second", 0.0))
        # The other end needs this message as well.
        await asyncio.sleep(seconds)
    finally:
        sending.cancel()
    return here, there


async def send_both(folder: Path, address: str, seconds: int, size: int) -> tuple[float, float]:
    """Received bytes per second at the other end and here, while both send."""
    node, link = _node(folder, SENDER), ResumableLink(RECEIVER, _AHEAD_BYTES)
    label = f"{_BOTH}{seconds},{size}"
    dialling = asyncio.create_task(link.keep_dialling(lambda: dial_link(address, RECEIVER, node, label)))
    here, there = await _stream(link, seconds, size)
    link.fail(PeerError("that was all"))
    await asyncio.gather(dialling, return_exceptions=True)
    return there, here


async def send(kind: str, folder: Path, address: str, messages: int, size: int) -> float:
    node = _node(folder, SENDER)
    if kind == "ravnest":
        link = ResumableLink(RECEIVER)
        tensor = torch.ones(size // 4)
        dialling = asyncio.create_task(link.keep_dialling(lambda: dial_link(address, RECEIVER, node, "bench")))
        for number in range(messages + 1):
            await link.send(Frame(FrameKind.FORWARD, number, tensors={"x": tensor}))
        await link.send(Frame(FrameKind.FORWARD, messages, marks=Marks(flush=True)))
        reply = await link.receive()
        assert reply is not None
        await link.close()
        await dialling
        return float(reply.scalars["bytes_per_second"])
    options = [*_LIMIT, *expecting(node_host(RECEIVER))]
    async with aio.secure_channel(address, channel_credentials(node.tls_keys()), options=options) as channel:
        call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()
        # Like our own sender, this joins the parts of each message without a further copy.
        content = memoryview(bytearray(size))
        for _ in range(messages + 1):
            await call.write(bytes(content))
        await call.write(_END)
        reply_bytes: Any = await call.read()
        return float(json.loads(reply_bytes))


def _node(folder: Path, name: str) -> NodeIdentity:
    return NodeIdentity.open(folder / name, read_certificate((folder / AUTHORITY).read_bytes()))


def main() -> None:
    do, kind, folder, where, *rest = sys.argv[1:]
    if do == "receive":
        asyncio.run(receive(kind, Path(folder), where))
    elif kind == "both":
        seconds, size = map(int, rest)
        print(*asyncio.run(send_both(Path(folder), where, seconds, size)))
    else:
        print(asyncio.run(send(kind, Path(folder), where, *map(int, rest))))


if __name__ == "__main__":
    main()
