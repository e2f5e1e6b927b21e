"""Targets for received streams: frames and the messages of the control protocol."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ravnest.codecs.codec import CODECS
from ravnest.errors import PeerError, RavnestError
from ravnest.microbatch import Marks
from ravnest.net.frames.decoding import decode_at
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import MAGIC, Frame, FrameKind
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.frame_stream import Control, Link
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import (
    Chunk,
    CoordinatorMessage,
    Deploy,
    FetchRequest,
    Neighbour,
    ProviderMessage,
)
from ravnest.provider.links.tensor_codec import coded, decoded
from ravnest.settings import ACTIVATION_CODECS
from tests.fuzz.rule import Target


def _frames(data: bytes) -> None:
    end = 0
    while end < len(data):
        frame, end = decode_at(data, end)
        for tensor in (*frame.tensors.values(), *(packed.data for packed in frame.coded.values())):
            # Reads every byte that the tensor refers to.
            tensor.clone()


def _frame_header(data: bytes) -> None:
    head = MAGIC + len(data).to_bytes(4, "little") + data
    frame, _ = decode_at(head + bytes(-len(head) % 64) + bytes(512), 0)
    for tensor in (*frame.tensors.values(), *(packed.data for packed in frame.coded.values())):
        tensor.clone()


def _frame_seeds() -> list[bytes]:
    weights = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    first = Frame(FrameKind.FORWARD, 7, marks=Marks(samples=3), generation=2, tensors={"h": weights, "t": weights.t()})
    second = Frame(FrameKind.RESULT, -1, marks=Marks(train=False), scalars={"loss": 0.5, "n": 3, "ok": True})
    third = Frame(FrameKind.FEED, 1, tensors={"mask": torch.ones(5, dtype=torch.bool), "none": torch.zeros(0, 2)})
    done = Frame(FrameKind.BACKWARD, 9, marks=Marks(checkpoint=3, flush=True), residence_micros=150_000)
    return [encode(first), encode(second) + encode(third), encode(done), *_coded_seeds()]


def _coded_frame(data: bytes) -> None:
    """A frame of a neighbour on a link of some codec, up to the tensors that its stage gets."""
    frame = decode_at(data, 0)[0]
    refused = None
    for name in ACTIVATION_CODECS:
        try:
            found = decoded(frame, CODECS[name])
        except PeerError as error:
            refused = error
            continue
        for key, tensor in found.tensors.items():
            assert key not in frame.coded or tensor.shape == frame.coded[key].shape
            assert key not in frame.coded or name != "int8" or tensor.isfinite().all()
        return
    assert refused is not None
    raise refused


def _coded_seeds() -> list[bytes]:
    tensors = {"h": torch.linspace(-3, 4, 600).reshape(20, 30), "t": torch.linspace(0, 1, 300).reshape(2, 150).t()}
    frame = Frame(FrameKind.BACKWARD, 7, marks=Marks(samples=3), generation=2, tensors=tensors)
    return [encode(coded(frame, CODECS[name])) for name in ACTIVATION_CODECS]


def _header_seeds() -> list[bytes]:
    return [seed[8 : 8 + int.from_bytes(seed[4:8], "little")] for seed in _frame_seeds()]


class _OneMessage:
    """A wire on which these bytes arrive as one message, followed by the end."""

    peer = "anna"
    label = ""
    dialled = True
    host = ""

    def __init__(self, data: bytes) -> None:
        self._messages: list[bytes | None] = [data, None]

    async def read(self) -> bytes | None:
        return self._messages.pop(0)

    async def write(self, message: bytes) -> None:
        pass

    async def end(self, refusal: PeerError | None) -> None:
        pass

    async def release(self) -> None:
        pass


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _link(data: bytes) -> None:
    async def receive() -> None:
        link = Link(_OneMessage(data))
        try:
            while await link.receive() is not None:
                pass
        finally:
            link.abort()
            await link.stream.finished()

    _runner().run(receive())


async def _carried(data: bytes) -> ResumableLink:
    """A link after a connection on which these bytes arrived."""
    link, connection = ResumableLink("anna"), Link(_OneMessage(data))
    await link.send(Frame(FrameKind.DONE, 1))
    try:
        await link.carry(connection)
    except PeerError:
        # The wire breaks after the bytes, which ends the link if it has not ended before.
        if not link.over or link.error is not None:
            raise
    finally:
        await connection.stream.finished()
    return link


def _resumable(data: bytes) -> None:
    async def receive() -> None:
        link = await _carried(data)
        while await link.receive() is not None:
            pass

    _runner().run(receive())


def _resumable_seeds() -> list[bytes]:
    begin, end = encode(Frame(FrameKind.RESUME, 0)), encode(Frame(FrameKind.END, 0))
    return [begin + end, begin + _frame_seeds()[0] + end]


def _control_message(data: bytes) -> None:
    """A message as it arrives on a ControlLink: in the bytes of a frame's tensor."""

    async def receive() -> None:
        frames = [Frame(FrameKind.RESUME, 0), Frame(FrameKind.END, 0)]
        if data:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            frames.insert(1, Frame(FrameKind.CONTROL, 0, tensors={"message": tensor}))
        link = await _carried(b"".join(map(encode, frames)))
        await ControlLink[Any, ProviderMessage](link, ProviderMessage).receive()

    _runner().run(receive())


def control(*kinds: Any) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        async def receive() -> None:
            refused = None
            for kind in kinds:
                control: Control[Any, Any] = Control(_OneMessage(data), kind)
                try:
                    await control.receive()
                except RavnestError as error:
                    refused = error
                finally:
                    control.abort()
                    await control.stream.finished()
            if refused is not None:
                raise refused

        _runner().run(receive())

    return decode


def _message_seeds() -> list[bytes]:
    order = Deploy(deployment="d1", stages=3, settings_json="{}", generation=4)
    order.next.CopyFrom(Neighbour(node="ben", address="10.0.0.1:7700", link="d1-0"))
    messages = [
        CoordinatorMessage(deploy=order),
        ProviderMessage(failed={"deployment": "d1", "kind": "error", "message": "no", "microbatch": -1}),
        Chunk(data=b"abc", offset=7, header={"name": "checkpoint-3"}, last=True),
        FetchRequest(artifact="graph-0", offset=9),
    ]
    return [message.SerializeToString() for message in messages]


TARGETS = (
    Target("frames", _frames, _frame_seeds),
    Target("coded_frame", _coded_frame, _coded_seeds),
    Target("frame_header", _frame_header, _header_seeds),
    Target("link", _link, _frame_seeds),
    Target("resumable", _resumable, _resumable_seeds),
    Target("control_message", _control_message, lambda: [_message_seeds()[1]]),
    Target("control", control(ProviderMessage, CoordinatorMessage, Chunk, FetchRequest), _message_seeds),
)
