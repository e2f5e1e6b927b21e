"""One attempt of a ring: pieces come from the owner before, are added to, and go on to the owner after."""

import threading
from collections.abc import Callable

from torch import Tensor

from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.errors import PeerError


class RingAttempt:
    """A reduction under way. Pieces may come from any thread; whichever brings one does the arithmetic.

    `send` takes a piece for the owner after this one and must not wait for it: in a ring, who waits to send before it
    takes anything waits for itself. `ended` is called once: with None when this owner has the mean, or with what went
    wrong. What others still need of this owner goes on being sent after that.
    """

    def __init__(
        self,
        number: int,
        before: str,
        reduce: RingReduce,
        send: Callable[[Piece], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self.number = number
        self.before = before
        """Who sends to this owner."""
        self.reduce = reduce
        self.bytes_sent = 0
        self._send = send
        self._ended = ended
        self._lock = threading.Lock()
        self._over = False
        self._rooms: dict[tuple[int, int], Tensor] = {}
        """By hop and chunk, where the bytes of a piece are being received."""

    def start(self) -> None:
        """Sends what this owner sends first: its own segment."""
        with self._lock:
            # A ring may have nothing but counters: then no piece ever comes.
            nothing = self.reduce.done and not self._over
        if nothing:
            self._ended(None)
            return
        own = self.reduce.start()
        while True:
            with self._lock:
                piece = None if self._over else next(own, None)
            if piece is None:
                return
            self._pass(piece)

    def room(self, hop: int, segment: int, chunk: int, size_bytes: int) -> Tensor | None:
        """Where the bytes of a piece that is about to be taken are to be received; None: it does not matter.

        One that comes over two lines at once gets room once, and is refused when it is taken from elsewhere: else the
        slower line would write over what has been taken and counted.
        """
        with self._lock:
            if self._over or self.reduce.done or (hop, chunk) in self._rooms:
                return None
            try:
                found = self.reduce.room(hop, segment, chunk, size_bytes)
            except PeerError:
                # It is refused when it is taken.
                return None
            if found is not None:
                self._rooms[hop, chunk] = found
            return found

    def take(self, piece: Piece) -> None:
        """A piece has come from the owner before."""
        failure: Exception | None = None
        onward: Piece | None = None
        with self._lock:
            if self._over or self.reduce.done:
                return
            try:
                room = self._rooms.pop((piece.hop, piece.chunk), None)
                if room is not None and room.data_ptr() != piece.data.data_ptr():
                    raise PeerError(f"piece {piece.chunk} of segment {piece.segment} came over two lines at once")
                onward = self.reduce.receive(piece)
            except Exception as error:
                failure, self._over = error, True
            done = failure is None and self.reduce.done
        if onward is not None:
            self._pass(onward)
        if done or failure is not None:
            self._ended(failure)

    def close(self) -> None:
        """Nothing more is taken, or begun to be sent."""
        with self._lock:
            self._over = True

    def _pass(self, piece: Piece) -> None:
        self.bytes_sent += piece.data.nbytes
        self._send(piece)
