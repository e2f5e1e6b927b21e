"""Ring all-reduce of one member: a weighted sum of all members' vectors, the same to the bit at every member.

Each member sends to the next one. The vector is cut into as many segments as there are members, and segments into
pieces. In the first half of the hops a piece goes round and every member adds its share. The member that adds the last
share encodes the sum once and keeps what that decodes to; in the second half those bytes go round unchanged. So each
member sends and receives 2 (n - 1) / n of the vector, all lines are busy at once, and no two members can hold different
sums.

    hop h, member i, of n:   sends segment (i - h) mod n to member i + 1, receives segment (i - 1 - h) mod n
    h < n - 1                partial sums of the members (segment) .. (segment + h)
    h >= n - 1               the sum of all

No sockets: `start` and `receive` return the pieces to send to the next member. Pieces of one sender may arrive in any
order that the hops allow. The results lie in scratch memory of this attempt and are discarded unless the round commits.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ravnest.averaging.norms import NormBounds, squared_norm
from ravnest.averaging.segments import PieceSpan, RingPosition, Segments
from ravnest.codecs.codec import PLAIN, Codec
from ravnest.errors import PeerError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment on its way round the ring."""

    hop: int
    segment: int
    chunk: int
    """The number of the piece within its segment."""
    data: Tensor
    """uint8, flat, encoded. May lie in the sender's scratch memory, which stays unchanged until the next member has the
    piece."""


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """A member's encoding errors of earlier rounds, which it adds to what it encodes in this one."""

    residual: Tensor | None = None
    """The errors themselves, of the size of the coded section; None: there are none."""
    norm: float = 0.0
    """The largest residual that any member may have, see `norms.next_residual_norm`."""


class RingReduce:
    """One member's part in one attempt. Not thread-safe.

    - An invalid piece raises PeerError, and its sender is to blame; the attempt is then worthless.
    - `own` and the residual are only read: the next attempt begins with the same.
    """

    def __init__(
        self,
        own: Tensor,
        coded_values: int,
        position: RingPosition,
        codec: Codec,
        *,
        feedback: ErrorFeedback | None = None,
        piece_values: int | None = None,
        scale: float = 1.0,
        memory: Tensor | None = None,
    ) -> None:
        """`scale`: the factor that gives this member's own coded section its declared length. `memory`: unused memory
        for the result, which this object takes over."""
        assert 0 <= coded_values <= own.numel()
        assert memory is None or (memory.shape == own.shape and memory.dtype == torch.float32)
        feedback = feedback or ErrorFeedback()
        self.position = position
        self.progress = 0
        """Pieces received."""
        self.next_residual = feedback.residual
        """Errors of this attempt's encoding, to be added in the next committed round; valid when done."""
        self.codec = codec
        self._own, self._residual, self._codec = own, feedback.residual, codec
        self._shares = (position.weight, position.weight * scale)
        self._segments = Segments(own.numel(), coded_values, position.members, piece_values)
        self._seen = [bytearray(self._segments.pieces(position.arriving(hop))) for hop in range(position.hops)]
        self._expected = sum(len(seen) for seen in self._seen)
        self._started = 0
        self._checksums: dict[tuple[int, int], int] = {}
        # Through numpy, which asks for large pages: the first write to new memory is faster with them.
        self._result = torch.from_numpy(np.empty(own.numel(), np.float32)) if memory is None else memory
        if codec.feedback and position.members > 1:
            self.next_residual = torch.empty(coded_values)
        self._bounds: NormBounds | None = None
        if position.norms is not None:
            self._bounds = NormBounds(position, codec, feedback.norm, coded_values)
        if position.members == 1:
            self._reduce_alone()

    @property
    def done(self) -> bool:
        return self.progress == self._expected

    @property
    def result(self) -> Tensor:
        """The weighted sum, which belongs to the caller."""
        assert self.done
        return self._result

    @property
    def digest(self) -> int:
        """A checksum of the result: the same for equal results, and almost never the same for others."""
        assert self.done
        digest = self._segments.values
        for place in sorted(self._checksums):
            digest = zlib.crc32(self._checksums[place].to_bytes(8, "little", signed=True), digest)
        return digest

    def start(self) -> Iterator[Piece]:
        """The pieces that this member sends first: its own segment, each piece computed when it is asked for."""
        if self.position.members == 1:
            return
        own_segment = self.position.index
        for chunk in range(self._segments.pieces(own_segment)):
            span = self._segments.span(own_segment, chunk)
            here = self._own_share(span)
            # With two members, the first hop is the last of the first half; the other member still finishes this sum.
            data = self._encode(here, span)
            self._started = chunk + 1
            yield Piece(0, own_segment, chunk, data)

    def room(self, hop: int, segment: int, chunk: int, size_bytes: int) -> Tensor | None:
        """Memory to receive the bytes of a piece into; None: any memory will do, because the bytes are used at once.

        Bytes that are passed on unchanged need memory of their own. Finished sums in float32 are received into the
        result. PeerError for an invalid piece.
        """
        span = self._place(hop, segment, chunk)
        if hop < self.position.members - 1:
            return None
        here = self._result[span.start : span.stop].view(torch.uint8)
        if (span.coded and self._codec is not PLAIN) or here.numel() != size_bytes:
            return torch.empty(size_bytes, dtype=torch.uint8)
        return here

    def receive(self, piece: Piece) -> Piece | None:
        """Take a piece from the previous member; returns the piece for the next one, if any.

        PeerError for an invalid piece: it does not belong here, came already, has the wrong size, is not finite, or is
        longer than the members' declarations allow.
        """
        span = self._place(piece.hop, piece.segment, piece.chunk)
        arrived = self._decode(piece, span)
        here = self._result[span.start : span.stop]
        hop, last_sum = piece.hop, self.position.members - 2
        if hop > last_sum:
            if arrived.data_ptr() != here.data_ptr():
                here.copy_(arrived)
            self._finish(piece, here)
            data = piece.data if span.coded and self._codec is not PLAIN else here.view(torch.uint8)
        else:
            torch.add(arrived, self._own[span.start : span.stop], alpha=self._shares[span.coded], out=here)
            if not span.coded and not math.isfinite(squared_norm(here)):
                # Plain values have no bound, and the next member would blame this one.
                raise PeerError(f"piece {piece.chunk} of segment {piece.segment} makes the sum overflow")
            data = self._encode(here, span, final=hop == last_sum)
            if hop == last_sum:
                self._finish(piece, here)
        self._seen[hop][piece.chunk] = 1
        self.progress += 1
        return Piece(hop + 1, piece.segment, piece.chunk, data) if hop + 1 < self.position.hops else None

    def _place(self, hop: int, segment: int, chunk: int) -> PieceSpan:
        position = self.position
        if not 0 <= hop < position.hops:
            raise PeerError(f"a piece says it is on hop {hop}, but this ring has {position.hops} hops")
        expected = position.arriving(hop)
        if segment != expected:
            raise PeerError(
                f"a piece of segment {segment} came on hop {hop}, on which segment {expected} comes by here"
            )
        seen = self._seen[hop]
        if not 0 <= chunk < len(seen):
            raise PeerError(f"piece {chunk} of segment {segment} came, but the segment has {len(seen)} pieces")
        if seen[chunk]:
            raise PeerError(f"piece {chunk} of segment {segment} came twice on hop {hop}")
        if hop >= position.members - 1:
            has_share = (
                chunk < self._started if segment == position.index else self._seen[hop - position.members][chunk]
            )
            if not has_share:
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
        if span.coded and self._bounds is not None:
            self._bounds.add(piece.hop, square)
        return values

    def _encode(self, here: Tensor, span: PieceSpan, final: bool = False) -> Tensor:
        """The values `here` as bytes. With `final`, `here` becomes what the other members will decode."""
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

    def _own_share(self, span: PieceSpan) -> Tensor:
        here = self._result[span.start : span.stop]
        return torch.mul(self._own[span.start : span.stop], self._shares[span.coded], out=here)

    def _finish(self, piece: Piece, here: Tensor) -> None:
        # A sum of bits modulo 2**32 does not depend on the order. Computed now, while the piece is in the cache.
        self._checksums[piece.segment, piece.chunk] = int(here.view(torch.int32).sum(dtype=torch.int32))

    def _reduce_alone(self) -> None:
        for chunk in range(self._segments.pieces(0)):
            here = self._own_share(self._segments.span(0, chunk))
            self._finish(Piece(0, 0, chunk, here), here)
