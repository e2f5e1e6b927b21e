"""An attempt to reduce a ring: pieces arrive from the previous owner, are added to, and go on to the next owner."""

import threading
from collections.abc import Callable

from torch import Tensor

from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.errors import PeerError


class RingAttempt:
    """A running reduce. Pieces may arrive on any thread, which then does the arithmetic.

    `send` queues a piece for the next owner and must not block: in a ring, an owner that blocks on sending before it
    receives would wait for itself. `on_end` is called once, with None when this owner has the mean and otherwise with
    the error. Pieces that other owners still need are sent after that, too.
    """

    def __init__(
        self,
        number: int,
        before: str,
        reduce: RingReduce,
        send: Callable[[Piece], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self.number = number
        self.before = before
        """The owner that sends to this one."""
        self.reduce = reduce
        self.bytes_sent = 0
        self._send = send
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_over = False
        self._rooms: dict[tuple[int, int], Tensor] = {}
        """Memory that pieces are being received into, by hop and chunk."""

    def start(self) -> None:
        """Send this owner's own segment, which begins the reduce."""
        with self._lock:
            # A ring of counters alone has no pieces.
            has_no_pieces = self.reduce.done and not self._is_over
        if has_no_pieces:
            self._on_end(None)
            return
        own = self.reduce.start()
        while True:
            with self._lock:
                piece = None if self._is_over else next(own, None)
            if piece is None:
                return
            self._pass_on(piece)

    def room(self, hop: int, segment: int, chunk: int, size_bytes: int) -> Tensor | None:
        """Memory to receive the bytes of a piece into before `take`; None: any memory will do.

        A piece that comes over two lines at once gets memory once, and `take` refuses it from any other memory.
        Otherwise the slower line would overwrite bytes that have been taken.
        """
        with self._lock:
            if self._is_over or self.reduce.done or (hop, chunk) in self._rooms:
                return None
            try:
                found = self.reduce.room(hop, segment, chunk, size_bytes)
            except PeerError:
                # `take` refuses the piece and reports it.
                return None
            if found is not None:
                self._rooms[hop, chunk] = found
            return found

    def take(self, piece: Piece) -> None:
        """Take a piece from the previous owner. An invalid piece ends the attempt with a PeerError."""
        failure: Exception | None = None
        onward: Piece | None = None
        with self._lock:
            if self._is_over or self.reduce.done:
                return
            try:
                room = self._rooms.pop((piece.hop, piece.chunk), None)
                if room is not None and room.data_ptr() != piece.data.data_ptr():
                    raise PeerError(f"piece {piece.chunk} of segment {piece.segment} came over two lines at once")
                onward = self.reduce.receive(piece)
            except Exception as error:
                failure, self._is_over = error, True
            is_done = failure is None and self.reduce.done
        if onward is not None:
            self._pass_on(onward)
        if is_done or failure is not None:
            self._on_end(failure)

    def close(self) -> None:
        """Take no more pieces and send no more of this owner's own segment."""
        with self._lock:
            self._is_over = True

    def _pass_on(self, piece: Piece) -> None:
        self.bytes_sent += piece.data.nbytes
        self._send(piece)
