"""Receiver of pieces: gives each piece that comes over a line to the attempt or donation that awaits it."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ravnest.averaging.ring_reduce import Piece
from ravnest.errors import PeerError
from ravnest.net.direct_line import DirectLine
from ravnest.net.frames.frames import RingPlace
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.donation import Donation
from ravnest.provider.rings.owned_ring import OwnedRing
from ravnest.provider.rings.reports import RingReports


class PieceReceiver:
    """The receiving side of a stage's rings. Lines call it on threads of their own.

    A piece that comes early blocks its line, which holds its sender back. A piece that comes late is dropped. An
    invalid piece raises PeerError. A line that breaks is reported to the coordinator, which begins another attempt.
    """

    def __init__(
        self,
        rings: Mapping[int, OwnedRing],
        generation: int,
        reports: RingReports,
        loop: asyncio.AbstractEventLoop,
        on_donated: Callable[[OwnedRing, Donation], None],
    ) -> None:
        """`on_donated` is called on the loop when a donation is complete."""
        self._rings = rings
        self._generation = generation
        self._reports = reports
        self._loop = loop
        self._on_donated = on_donated
        self._changed = threading.Condition()
        self._is_closed = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the rounds and attempts of rings within this block; lines that wait look again after it."""
        with self._changed:
            yield
            self._changed.notify_all()

    def close(self) -> None:
        """Release all lines that wait, and drop all that comes from now on."""
        with self.changing():
            self._is_closed = True

    def take_all(self, line: DirectLine) -> None:
        """Take what comes over a direct line, until it ends or breaks the rules. Blocks the line's own thread."""
        reached: dict[int, RingPlace] = {}
        try:
            while (piece := line.receive(partial(self.room, line.peer))) is not None:
                generation, place, data = piece
                reached[place.ring] = place
                self.take(line.peer, generation, place, data)
            on_end = partial(self._on_line_ended, line.peer, list(reached.values()))
        except PeerError as error:
            on_end = partial(self.on_line_broken, line.peer, str(error))
        if not self._is_closed:
            self._loop.call_soon_threadsafe(on_end)

    def take(self, peer: str, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        """Take a piece from another owner; blocks while the piece is early. PeerError for an invalid piece.

        Called on any thread but the loop's.
        """
        owned = self._rings.get(place.ring)
        if generation != self._generation or owned is None or data.dtype != torch.uint8 or data.dim() != 1:
            raise PeerError(f"{peer} sent a piece of ring {place.ring} that does not belong to this stage")
        with self._changed:
            awaiting = self._awaiting(owned, place)
            if isinstance(awaiting, Donation):
                if awaiting.take(peer, place, data) and owned.joined is not None:
                    owned.joined.donation = None
                    self._loop.call_soon_threadsafe(self._on_donated, owned, awaiting)
                return
        if awaiting is None:
            return
        if peer != awaiting.before:
            raise PeerError(f"{peer} sent a piece of ring {place.ring}, but it is not the owner before this one")
        awaiting.take(Piece(place.hop, place.segment, place.chunk, data))

    def room(self, peer: str, generation: int, place: RingPlace, size_bytes: int) -> torch.Tensor | None:
        """Memory for the bytes of a piece that is about to be received; None: any memory will do.

        Only the previous owner gets memory of the reduce itself. Pieces of other nodes are refused by `take`.
        """
        owned = self._rings.get(place.ring)
        if owned is None or generation != self._generation:
            return None
        with self._changed:
            awaiting = self._awaiting(owned, place)
        if place.donation:
            return torch.empty(size_bytes, dtype=torch.uint8)
        if not isinstance(awaiting, RingAttempt) or peer != awaiting.before:
            return None
        return awaiting.room(place.hop, place.segment, place.chunk, size_bytes)

    def is_wanted(self, place: RingPlace) -> bool:
        """Whether a piece that waits to be sent is still of use: its attempt goes on, or an owner may still catch up.
        On any thread."""
        with self._changed:
            joined = self._rings[place.ring].joined
            if self._is_closed or joined is None or joined.round != place.round:
                return False
            if place.donation:
                # Once an attempt begins, every owner has caught up or is left out.
                return joined.attempt is None
            return joined.attempt is not None and joined.attempt.run.number == place.attempt

    def is_urgent(self, place: RingPlace) -> bool:
        """Whether a piece belongs to a round for which training stands still, so that it must not be held back. On any
        thread."""
        with self._changed:
            joined = self._rings[place.ring].joined
            return joined is not None and joined.is_urgent

    def on_line_broken(self, peer: str, reason: str) -> None:
        """A line broke, or brought an invalid piece: attempts that need it cannot go on."""
        for owned in self._rings.values():
            attempt = None if owned.joined is None else owned.joined.attempt
            if attempt is not None and peer in (attempt.run.before, attempt.after):
                attempt.run.close()
                self._reports.line_broke(owned, attempt.run.number, reason)

    def _awaiting(self, owned: OwnedRing, place: RingPlace) -> RingAttempt | Donation | None:
        """The attempt or donation that awaits this piece; None if the piece is late. Waits while it is early."""
        self._changed.wait_for(lambda: self._is_closed or not owned.is_early(place))
        if self._is_closed or owned.joined is None or not owned.awaits(place):
            return None
        if place.donation:
            return owned.joined.donation
        return None if owned.joined.attempt is None else owned.joined.attempt.run

    def _on_line_ended(self, peer: str, reached: Sequence[RingPlace]) -> None:
        """A direct line has ended after these pieces. Its sender may believe that it has sent more, so an incomplete
        attempt fails now instead of at its deadline."""
        reason = f"the direct line from {peer} ended"
        for place in reached:
            owned = self._rings.get(place.ring)
            if owned is None or owned.joined is None or not owned.awaits(place):
                continue
            attempt = owned.joined.attempt
            if place.donation:
                self._reports.failed(owned, 0, peer, reason)
            elif attempt is not None and not attempt.run.reduce.done:
                attempt.run.close()
                self._reports.line_broke(owned, place.attempt, reason)
