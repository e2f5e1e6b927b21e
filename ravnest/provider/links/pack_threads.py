"""Threads that code and pack the frames of a stage's links, off the computing thread and off the network's loop.

Each direction of each link works on one frame at a time, so its frames keep their order; the directions work in
parallel. Small frames are packed at once, because passing them to a thread and back would take longer.
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
from ravnest.provider.links.cuda_copies import DeviceCopies
from ravnest.provider.links.tensor_codec import coded, decoded, raw_bytes, saved_bytes

AT_ONCE_BYTES: Final = 1 << 18
"""Maximum size of a frame that is packed at once. Coding it as int8 takes 60 µs, about as long as waking a thread."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame that a stage sends, and the event at which its tensors are computed; None if they are."""

    frame: Frame
    computed: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded frame, and the number of bytes that its codec saved."""

    data: bytes
    saved_bytes: int


class Packing:
    """The threads of one stage's links."""

    def __init__(self, directions: int, copies: DeviceCopies) -> None:
        """`directions` may work at the same time."""
        self._copies = copies
        self._threads = ThreadPoolExecutor(max(1, directions), "ravnest-packing")

    async def pack(self, outgoing: Outgoing, codec: Codec) -> Packed:
        """The frame in the codec, as bytes. PeerError, as in `encode`."""

        def work() -> Packed:
            frame = self._copies.out(outgoing.frame, outgoing.computed, lambda frame: coded(frame, codec))
            return Packed(encode(frame), saved_bytes(frame))

        return await self._run(outgoing.frame, work)

    async def unpack(self, frame: Frame, codec: Codec, check: Callable[[Frame], None]) -> Frame:
        """The received frame, decoded, checked, and on the stage's device. PeerError, as in `decoded`, and any error of
        `check`."""

        def work() -> Frame:
            found = self._copies.into(frame, lambda frame: decoded(frame, codec))
            check(found)
            return found

        return await self._run(frame, work)

    def close(self) -> None:
        """End the threads after their current work. No other method may be called afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, frame: Frame, work: Callable[[], T]) -> T:
        size = raw_bytes(frame)
        if size < AT_ONCE_BYTES and (self._copies.on_host or not size):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
