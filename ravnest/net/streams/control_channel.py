"""Control messages between a coordinator and a provider, over a link that outlives its connections."""

from typing import Generic, TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from ravnest.errors import PeerError, RefusedError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.frames.tensor_bytes import tensor_bytes
from ravnest.net.streams.frame_stream import CONTROL_BYTES
from ravnest.net.streams.resumable_link import ResumableLink

SentT = TypeVar("SentT", bound=Message)
ReceivedT = TypeVar("ReceivedT", bound=Message)

_MESSAGE = "message"


class ControlLink(Generic[SentT, ReceivedT]):
    """Messages in both directions, each once and in order. It fails when its link fails."""

    def __init__(self, link: ResumableLink, received: type[ReceivedT]) -> None:
        self.link = link
        self._received = received

    async def send(self, message: SentT) -> None:
        """Send a message, waiting while the link's window is full. PeerError once the link is closed or has failed."""
        data = message.SerializeToString()
        if not data or len(data) > CONTROL_BYTES:
            raise PeerError(
                f"a {type(message).__name__} of {len(data)} bytes cannot be sent to {self.link.peer}; "
                f"1 to {CONTROL_BYTES} are allowed"
            )
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        await self.link.send(Frame(FrameKind.CONTROL, 0, tensors={_MESSAGE: tensor}))

    async def receive(self) -> ReceivedT | None:
        """The next message; None after the other end's orderly end. An invalid message fails the link for good."""
        frame = await self.link.receive()
        if frame is None:
            return None
        try:
            return self._decoded(frame)
        except (DecodeError, ValueError) as error:
            refused = RefusedError(f"{self.link.peer} sent a bad message: {error}")
            self.link.fail(refused)
            raise refused from None

    def _decoded(self, frame: Frame) -> ReceivedT:
        data = frame.tensors.get(_MESSAGE)
        if frame.kind is not FrameKind.CONTROL or data is None or data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"a {frame.kind.name} frame without a control message")
        if data.nbytes > CONTROL_BYTES:
            raise ValueError(f"{data.nbytes} bytes are more than {CONTROL_BYTES}")
        message = self._received()
        message.ParseFromString(bytes(tensor_bytes(data)))
        return message
