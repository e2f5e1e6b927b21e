"""Control messages between a coordinator and a provider, over a link that outlives its connections."""

from typing import Generic, TypeVar

import torch
from google.protobuf.message import Message

from ravnest.errors import RefusedError
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.frames.tensor_bytes import tensor_bytes
from ravnest.net.streams.messages import message_bytes, read_message
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
        data = message_bytes(message, self.link.peer)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        await self.link.send(Frame(FrameKind.CONTROL, 0, tensors={_MESSAGE: tensor}))

    async def receive(self) -> ReceivedT | None:
        """The next message; None after the other end's orderly end. An invalid message fails the link for good."""
        frame = await self.link.receive()
        if frame is None:
            return None
        try:
            data = frame.tensors.get(_MESSAGE)
            if frame.kind is not FrameKind.CONTROL or data is None or data.dtype != torch.uint8 or data.dim() != 1:
                sent = f"a {frame.kind.name} frame without a control message"
                raise RefusedError(f"{self.link.peer} sent a bad message: {sent}")
            return read_message(self._received, bytes(tensor_bytes(data)), self.link.peer)
        except RefusedError as refused:
            self.link.fail(refused)
            raise
