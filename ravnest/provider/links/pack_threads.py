"""Coding and packing the frames of a stage's links, neither on the thread that computes nor on the network's loop.

Each direction of each link has one frame in hand at a time, so frames keep their order; the directions go on beside
one another. What is so small that passing it to a thread and back would take longer is done at once.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from ravnest.codecs.codec import Codec
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame
from ravnest.provider.links.cuda_copies import Transfers
from ravnest.provider.links.tensor_codec import coded, decoded, raw_bytes, saved_bytes

AT_ONCE_BYTES: Final = 1 << 18
"""Tensors of a frame that are coded and packed at once. As int8 that takes 60 µs, about as long as a thread to wake."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame that a stage puts out, and when its tensors are computed; None where they are."""

    frame: Frame
    computed: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A frame as it is sent, and how many bytes it would be more without a codec."""

    data: bytes
    saved_bytes: int


class Packing:
    """The threads of one stage's links."""

    def __init__(self, directions: int, transfers: Transfers) -> None:
        """So many directions may be at work at once."""
        self._transfers = transfers
        self._threads = ThreadPoolExecutor(max(1, directions), "ravnest-packing")

    async def pack(self, outgoing: Outgoing, codec: Codec) -> Packed:
        """The frame in the codec, as bytes. PeerError, as `encode`."""

        def work() -> Packed:
            frame = self._transfers.out(outgoing.frame, outgoing.computed, lambda frame: coded(frame, codec))
            return Packed(encode(frame), saved_bytes(frame))

        return await self._run(outgoing.frame, work)

    async def unpack(self, frame: Frame, codec: Codec, check: Callable[[Frame], None]) -> Frame:
        """The frame that came, decoded, checked, and on the stage's device. PeerError, as `decoded`, and what `check`
        raises."""

        def work() -> Frame:
            found = self._transfers.into(frame, lambda frame: decoded(frame, codec))
            check(found)
            return found

        return await self._run(frame, work)

    def close(self) -> None:
        """Ends the threads, when what they have in hand is done. Nothing more may be asked of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, frame: Frame, work: Callable[[], T]) -> T:
        size = raw_bytes(frame)
        if size < AT_ONCE_BYTES and (self._transfers.on_host or not size):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
