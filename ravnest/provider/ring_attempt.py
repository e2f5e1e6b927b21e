"""One attempt of a ring: pieces come from the owner before, are added to, and go on to the owner after.

The arithmetic is done on the thread of the rings, and sending never holds up receiving: in a ring, who waits to send
before it takes anything waits for itself.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch

from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.errors import PeerError

T = TypeVar("T")

InThread = Callable[..., Awaitable[Any]]
"""Calls a function on the thread of the rings."""

Send = Callable[[Piece], Awaitable[None]]
"""Sends a piece to the owner after this one."""


class RingAttempt:
    """Runs a reduction until it is done. Closing it forgets what has not been sent."""

    def __init__(self, number: int, before: str, reduce: RingReduce, send: Send, in_thread: InThread) -> None:
        self.number = number
        self.before = before
        """Who sends to this owner."""
        self.reduce = reduce
        self.bytes_sent = 0
        self._send = send
        self._in_thread = in_thread
        self._inbox: asyncio.Queue[Piece] = asyncio.Queue()
        self._outgoing: deque[Piece] = deque()
        self._more = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def take(self, piece: Piece) -> None:
        """A piece has come from the owner before."""
        self._inbox.put_nowait(piece)

    async def run(self) -> None:
        """Returns when this owner has the mean; what others still need of it is sent on meanwhile and afterwards.

        PeerError where a piece breaks the rules: its sender is the owner before.
        """
        self._sending = asyncio.create_task(self._send_all())
        while not self.reduce.done:
            piece = await self._next_piece()
            onward = await self._in_thread(self.reduce.receive, piece)
            if onward is not None:
                self._outgoing.append(onward)
                self._more.set()

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _next_piece(self) -> Piece:
        assert self._sending is not None
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        getting = asyncio.ensure_future(self._inbox.get())
        try:
            await asyncio.wait({getting, self._sending}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                # The line to the owner after this one has failed for good: so nothing comes round any more.
                self._sending.result()
            return await getting
        finally:
            getting.cancel()

    async def _send_all(self) -> None:
        own = self.reduce.start()
        while (piece := await self._in_thread(next, own, None)) is not None:
            await self._pass(piece)
        while True:
            while self._outgoing:
                await self._pass(self._outgoing.popleft())
            self._more.clear()
            await self._more.wait()

    async def _pass(self, piece: Piece) -> None:
        await self._send(piece)
        self.bytes_sent += piece.data.nbytes


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes."""
    return values.view(torch.uint8)


def as_values(data: torch.Tensor) -> torch.Tensor:
    """Bytes of a peer as float32 numbers; PeerError where they are none."""
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() % 4:
        raise PeerError("a piece of a ring is not made of bytes of float32 numbers")
    return data.view(torch.float32)
