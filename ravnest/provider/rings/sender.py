"""Sender of pieces to one other owner: over a direct line if there is one, otherwise over the link."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final

import torch

from ravnest.errors import PeerError
from ravnest.net.direct_line import DirectLine, dial_direct
from ravnest.net.frames.frames import Frame, FrameKind, RingPlace
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.rings.direct_line_retries import DirectLineRetries
from ravnest.provider.rings.receiver import PieceReceiver

DIAL_SECONDS: Final = 2.0

WaitTurn = Callable[[int], None]
"""Blocks until this many bytes of state may be sent: see `PieceSender`."""

SendFrame = Callable[[Frame], Coroutine[Any, Any, None]]
"""Sends a frame over the link, on the network's loop."""


class PieceSender:
    """Sends pieces in order on a thread of its own, which the first piece starts. `put` may be called on any thread.

    With `wait_turn`, each piece waits for its turn on this machine's line, unless training stands still for the round.
    """

    def __init__(
        self,
        peer: Neighbour,
        generation: int,
        node: NodeIdentity,
        receiver: PieceReceiver,
        send_frame: SendFrame,
        wait_turn: WaitTurn | None = None,
    ) -> None:
        self._peer = peer
        self._generation = generation
        self._node = node
        self._receiver = receiver
        self._send_frame = send_frame
        self._wait_turn = wait_turn
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[RingPlace, torch.Tensor] | None] = queue.SimpleQueue()
        self._direct: DirectLine | None = None
        self._retries = DirectLineRetries()
        self._sending: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_direct(self) -> bool:
        """Whether the direct line is up."""
        return self._direct is not None

    def put(self, place: RingPlace, data: torch.Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="ravnest-ring-sender", daemon=True)
            self._thread.start()
        self._queue.put((place, data))

    def close(self) -> None:
        """Drop what is queued and end the direct line at once."""
        self._is_closed = True
        self._queue.put(None)
        if self._direct is not None:
            self._direct.close()
        if self._sending is not None:
            self._sending.cancel()

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None and not self._is_closed:
            place, data = item
            if not self._receiver.is_wanted(place):
                continue
            if self._wait_turn is not None and not self._receiver.is_urgent(place):
                self._wait_turn(data.nbytes)
                if self._is_closed:
                    return
                if not self._receiver.is_wanted(place):
                    continue
            try:
                self._send(place, data)
            except (PeerError, CancelledError, RuntimeError) as error:
                if self._is_closed:
                    return
                self._loop.call_soon_threadsafe(self._receiver.on_line_broken, self._peer.node, str(error))

    def _send(self, place: RingPlace, data: torch.Tensor) -> None:
        address = self._peer.direct_address
        if self._direct is None and address and self._retries.is_due(place.round):
            try:
                self._direct = dial_direct(address, self._peer.node, self._node, DIAL_SECONDS)
            except PeerError:
                self._retries.failed(place.round)
        if self._direct is not None:
            try:
                self._direct.send(self._generation, place, data)
            except PeerError:
                self._direct.close()
                self._direct = None
                self._retries.failed(place.round)
                raise
            self._retries.carried(place.round)
            return
        frame = Frame(FrameKind.RING, 0, generation=self._generation, tensors={"data": data}, piece=place)
        self._sending = asyncio.run_coroutine_threadsafe(self._send_frame(frame), self._loop)
        self._sending.result()
