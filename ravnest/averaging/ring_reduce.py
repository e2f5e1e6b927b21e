"""One member's part in reducing a ring: a weighted sum of everybody's vectors, bit for bit the same at all of them.

Members stand in a ring and each sends to the next. The vector is cut into as many segments as there are members, and
segments into pieces. In the first half of the hops a piece goes round and everybody adds its share; who adds the last
share encodes the sum once, takes what that decodes to, and in the second half the same bytes go round. So each member
sends and receives 2 (n - 1) / n of the vector, all lines are busy at once, and no two members can hold different sums.

    hop h, member i, of n:   sends segment (i - h) mod n to member i + 1, receives segment (i - 1 - h) mod n
    h < n - 1                partial sums of the members (segment) .. (segment + h)
    h >= n - 1               the sum of all

No sockets: `start` and `receive` say what to send to the next member. Pieces of one sender may arrive in any order that
the hops allow. What is computed lies in scratch memory of this attempt; nothing of it is used unless the round commits.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ravnest.averaging.norms import allowed_norm, codec_error, squared_norm
from ravnest.averaging.segments import PieceSpan, Segments
from ravnest.codecs.codec import PLAIN, Codec
from ravnest.errors import PeerError

_PER_HOP: Final = 1.001
"""Machines sum squares in different orders: what one lets pass, the next one lets pass with certainty."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What travels: a part of a segment on its way round."""

    hop: int
    segment: int
    chunk: int
    """Which piece of the segment."""
    data: Tensor
    """uint8, flat, encoded. May lie in the sender's scratch memory, where it stays as it is until the next member has
    it."""


class RingReduce:
    """One attempt of one member. Not thread-safe.

    - A piece that cannot be raises PeerError, and the one who sent it is to blame; the attempt is then worth nothing.
    - `own` and `residual` are only read: the next attempt begins with the same.
    """

    def __init__(
        self,
        own: Tensor,
        coded_values: int,
        weights: Sequence[float],
        index: int,
        codec: Codec,
        *,
        norms: Sequence[float] | None,
        residual: Tensor | None = None,
        piece_values: int | None = None,
        scale: float = 1.0,
        carried: float = 0.0,
        memory: Tensor | None = None,
    ) -> None:
        """`weights` sum to 1, in ring order, and `index` is this member's place.

        `norms`: how long everybody's coded section is by declaration, after clipping; None: lengths are not checked.
        `residual`: what encoding lost in earlier rounds, for a codec with feedback. `scale`: what this member's own
        coded section is multiplied with so as to have its declared length. `carried`: see `norms.carried_norm`.
        `memory`: for the result, where there is some that nobody uses any more; it is taken over.
        """
        members = len(weights)
        assert 0 <= index < members and 0 <= coded_values <= own.numel()
        assert norms is None or len(norms) == members
        self.progress = 0
        """Pieces received."""
        self.next_residual: Tensor | None = None
        """What encoding lost in this attempt and has to be sent in the next committed round; valid when done."""
        self._own, self._residual, self._codec = own, residual, codec
        self._index, self._members = index, members
        self._shares = (weights[index], weights[index] * scale)
        self._segments = Segments(own.numel(), coded_values, members, piece_values)
        self._hops = 2 * (members - 1)
        self._seen = [bytearray(self._segments.pieces(self._arriving(hop))) for hop in range(self._hops)]
        self._expected = sum(len(seen) for seen in self._seen)
        self._started = 0
        self._sums: dict[tuple[int, int], int] = {}
        assert memory is None or (memory.shape == own.shape and memory.dtype == torch.float32)
        # Through numpy, which asks for large pages: the memory is new, and all of it is written in no time.
        self._result = torch.from_numpy(np.empty(own.numel(), np.float32)) if memory is None else memory
        if codec.feedback and members > 1:
            self.next_residual = torch.empty(coded_values)
        else:
            self.next_residual = residual
        self.declared = 0.0
        """How long the sum may be by what everybody declared; 0 where nobody did."""
        if norms is not None:
            self.declared = math.fsum(weight * length for weight, length in zip(weights, norms, strict=True))
        self._squares = [0.0] * self._hops
        self._allowed = self._allowances(weights, norms, carried, coded_values)
        if members == 1:
            self._alone()

    @property
    def done(self) -> bool:
        return self.progress == self._expected

    @property
    def result(self) -> Tensor:
        """The weighted sum; whoever takes it owns it."""
        assert self.done
        return self._result

    @property
    def digest(self) -> int:
        """Equal where results are equal, and hardly ever where they are not; valid when done."""
        assert self.done
        digest = self._segments.values
        for place in sorted(self._sums):
            digest = zlib.crc32(self._sums[place].to_bytes(8, "little", signed=True), digest)
        return digest

    def start(self) -> Iterator[Piece]:
        """What this member sends first: its own segment, a piece at a time, each made when it is asked for."""
        if self._members == 1:
            return
        for chunk in range(self._segments.pieces(self._index)):
            span = self._segments.span(self._index, chunk)
            here = self._result[span.start : span.stop]
            torch.mul(self._own[span.start : span.stop], self._shares[span.coded], out=here)
            # With two members the first hop is the last of the first half, but the sum is the other one's to finish.
            data = self._encode(here, span)
            self._started = chunk + 1
            yield Piece(0, self._index, chunk, data)

    def room(self, hop: int, segment: int, chunk: int, size_bytes: int) -> Tensor | None:
        """Memory for the bytes of a piece that is about to come, where they must not lie in memory that is soon used
        again: what is passed on as it came, and sums in float32, which are received where they belong.

        PeerError for a piece that cannot be.
        """
        span = self._place(hop, segment, chunk)
        if hop < self._members - 1:
            return None
        here = self._result[span.start : span.stop].view(torch.uint8)
        if (span.coded and self._codec is not PLAIN) or here.numel() != size_bytes:
            return torch.empty(size_bytes, dtype=torch.uint8)
        return here

    def receive(self, piece: Piece) -> Piece | None:
        """Takes a piece from the member before; what to send on to the next one, if anything.

        PeerError: the piece cannot be: it has no business here, came already, has the wrong size, is not finite, or is
        longer than what everybody declared allows.
        """
        span = self._place(piece.hop, piece.segment, piece.chunk)
        arrived = self._decode(piece, span)
        here = self._result[span.start : span.stop]
        hop = piece.hop
        if hop >= self._members - 1:
            if arrived.data_ptr() != here.data_ptr():
                here.copy_(arrived)
            self._finish(piece, here)
            data = piece.data if span.coded and self._codec is not PLAIN else here.view(torch.uint8)
        else:
            torch.add(arrived, self._own[span.start : span.stop], alpha=self._shares[span.coded], out=here)
            if not span.coded and not math.isfinite(squared_norm(here)):
                # Nothing bounds plain values, and the next member would blame this one.
                raise PeerError(f"piece {piece.chunk} of segment {piece.segment} makes the sum overflow")
            if hop == self._members - 2:
                data = self._encode(here, span, final=True)
                self._finish(piece, here)
            else:
                data = self._encode(here, span)
        self._seen[hop][piece.chunk] = 1
        self.progress += 1
        return Piece(hop + 1, piece.segment, piece.chunk, data) if hop + 1 < self._hops else None

    def _arriving(self, hop: int) -> int:
        return (self._index - 1 - hop) % self._members

    def _place(self, hop: int, segment: int, chunk: int) -> PieceSpan:
        if not 0 <= hop < self._hops:
            raise PeerError(f"a piece says it is on hop {hop}, but this ring has {self._hops} hops")
        if segment != self._arriving(hop):
            raise PeerError(
                f"a piece of segment {segment} came on hop {hop}, where segment {self._arriving(hop)} comes by here"
            )
        seen = self._seen[hop]
        if not 0 <= chunk < len(seen):
            raise PeerError(f"piece {chunk} came of segment {segment}, which has {len(seen)} pieces")
        if seen[chunk]:
            raise PeerError(f"piece {chunk} of segment {segment} came twice on hop {hop}")
        if hop >= self._members - 1:
            left = chunk < self._started if segment == self._index else self._seen[hop - self._members][chunk]
            if not left:
                raise PeerError(
                    f"the sum of piece {chunk} of segment {segment} came before this member's share was added to it"
                )
        return self._segments.span(segment, chunk)

    def _decode(self, piece: Piece, span: PieceSpan) -> Tensor:
        count = span.stop - span.start
        codec = self._codec if span.coded else PLAIN
        size = codec.size_bytes(count)
        data = piece.data
        fits = data.numel() <= size if codec.varies else data.numel() == size
        if data.dtype != torch.uint8 or data.dim() != 1 or not fits:
            raise PeerError(
                f"piece {piece.chunk} of segment {piece.segment} has {data.numel()} bytes on hop {piece.hop}; "
                f"{count} values in {codec.name} are {'at most ' * codec.varies}{size}"
            )
        values = codec.decode(data, count)
        square = squared_norm(values)
        if not math.isfinite(square):
            raise PeerError(f"piece {piece.chunk} of segment {piece.segment} holds values that are not finite")
        if span.coded and self._allowed is not None:
            self._check_norm(piece, square)
        return values

    def _check_norm(self, piece: Piece, square: float) -> None:
        """Lengths add up over the pieces of a hop, and no further: what comes on the next is the work of others, and
        what one member lets pass must not make the next one blame it."""
        assert self._allowed is not None
        self._squares[piece.hop] += square
        length, allowed = math.sqrt(self._squares[piece.hop]), self._allowed[piece.hop]
        if length > allowed:
            raise PeerError(
                f"the sum that came on hop {piece.hop} has a norm of at least {length:.4g}, but by the norms that "
                f"its contributors declared it is at most {allowed:.4g}"
            )

    def _encode(self, here: Tensor, span: PieceSpan, final: bool = False) -> Tensor:
        """The values `here` as bytes. With `final`, `here` becomes what the others will decode."""
        if not span.coded:
            return PLAIN.encode(here)
        if not self._codec.lossy:
            return self._codec.encode(here)
        if self._codec.feedback and self._residual is not None:
            here.add_(self._residual[span.start : span.stop])
        data = self._codec.encode(here)
        if final or self._codec.feedback:
            decoded = self._codec.decode(data, span.stop - span.start)
            if self._codec.feedback:
                # Every member encodes every segment once, so this fills the whole residual.
                assert self.next_residual is not None
                torch.sub(here, decoded, out=self.next_residual[span.start : span.stop])
            if final:
                here.copy_(decoded)
        return data

    def _finish(self, piece: Piece, here: Tensor) -> None:
        # A sum of bits is the same in any order, modulo 2**32; made now, while the piece is in the cache.
        self._sums[piece.segment, piece.chunk] = int(here.view(torch.int32).sum(dtype=torch.int32))

    def _alone(self) -> None:
        for chunk in range(self._segments.pieces(0)):
            span = self._segments.span(0, chunk)
            here = self._result[span.start : span.stop]
            torch.mul(self._own[span.start : span.stop], self._shares[span.coded], out=here)
            self._finish(Piece(0, 0, chunk, here), here)

    def _allowances(
        self, weights: Sequence[float], norms: Sequence[float] | None, carried: float, values: int
    ) -> list[float] | None:
        """How long what arrives may be, on each hop."""
        if norms is None:
            return None
        shares = [weight * length for weight, length in zip(weights, norms, strict=True)]
        if self._codec.feedback:
            # One that has just come cannot know what the others carry: not less than what this round may leave them.
            carried = max(carried, 2 * codec_error(self._codec) * self.declared)
        allowed: list[float] = []
        for hop in range(self._hops):
            contributors = min(hop + 1, self._members)
            arriving = [shares[(self._index - 1 - back) % self._members] for back in range(contributors)]
            allowed.append(allowed_norm(self._codec, arriving, carried, values) * _PER_HOP**hop)
        return allowed
