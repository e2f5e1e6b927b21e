"""Geometry of a reduce: a member's position in the ring, and the cut of the vector into segments and pieces.

The vector has a coded and a plain section. Both are cut into as many segments as there are members, so a segment is a
part of each section. Segments are cut into pieces, which travel one by one; a piece lies within one section. Every
member computes the same cut from the same sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_PIECES_PER_SEGMENT: Final = 16
"""Enough pieces for sending, adding and receiving to overlap."""
MIN_PIECE_VALUES: Final = 4_096
"""Fewer values in a piece would cost more for its frame than they save, and codecs work in blocks of up to 256."""
_MAX_VALUES: Final = 262_144
"""1 MiB of float32, which stays in the cache from one operation to the next."""


@dataclass(frozen=True, slots=True)
class RingPosition:
    """A member's place in the ring, and the weights and norms of all members in ring order."""

    index: int
    weights: Sequence[float]
    """The shares of the members, which sum to 1."""
    norms: Sequence[float] | None
    """The declared length of each member's coded section, after clipping; None: lengths are not checked."""

    def __post_init__(self) -> None:
        assert 0 <= self.index < len(self.weights)
        assert self.norms is None or len(self.norms) == len(self.weights)

    @property
    def members(self) -> int:
        return len(self.weights)

    @property
    def hops(self) -> int:
        """The number of times that a member sends on a segment."""
        return 2 * (self.members - 1)

    @property
    def weight(self) -> float:
        return self.weights[self.index]

    @property
    def declared_lengths(self) -> list[float]:
        """The length that each member adds to the sum by its declaration; empty without norms."""
        return [] if self.norms is None else [w * length for w, length in zip(self.weights, self.norms, strict=True)]

    @property
    def declared_length(self) -> float:
        """The largest length of the sum by what the members declared; 0 without norms."""
        return math.fsum(self.declared_lengths)

    def arriving(self, hop: int) -> int:
        """The segment that this member receives on a hop."""
        return (self.index - 1 - hop) % self.members


class PieceSpan(NamedTuple):
    """The place of a piece in the vector."""

    start: int
    stop: int
    coded: bool


class Segments:
    """The cut of a vector of `values` values, the first `coded_values` of them the coded section."""

    def __init__(self, values: int, coded_values: int, members: int, piece_values: int | None = None) -> None:
        self.values = values
        self.members = members
        self.piece_values = piece_values or default_piece_values(values, members)
        self._sections = ((0, coded_values, True), (coded_values, values - coded_values, False))
        self._spans = tuple(tuple(self._spans_of(segment)) for segment in range(members))

    def pieces(self, segment: int) -> int:
        """The number of pieces of a segment; 0 where there are fewer values than members."""
        return len(self._spans[segment])

    def span(self, segment: int, chunk: int) -> PieceSpan:
        return self._spans[segment][chunk]

    def _spans_of(self, segment: int) -> list[PieceSpan]:
        return [
            PieceSpan(piece, min(piece + self.piece_values, stop), coded)
            for begin, count, coded in self._sections
            for stop in [begin + (segment + 1) * count // self.members]
            for piece in range(begin + segment * count // self.members, stop, self.piece_values)
        ]


def default_piece_values(values: int, members: int, max_values: int = _MAX_VALUES) -> int:
    """A sixteenth of a segment, within limits, and a multiple of the smallest piece, because codecs work in blocks."""
    per_segment = -(-values // members)
    pieces = -(-per_segment // (_PIECES_PER_SEGMENT * MIN_PIECE_VALUES))
    most = max(min(max_values, _MAX_VALUES) // MIN_PIECE_VALUES, 1)
    return min(max(pieces, 1), most) * MIN_PIECE_VALUES


def pieces_received(values: int, coded_values: int, members: int, max_values: int = _MAX_VALUES) -> int:
    """The number of pieces that each member receives in a whole reduce, give or take one per hop."""
    if members < 2 or values == 0:
        return 0
    pieces = default_piece_values(values, members, max_values)
    sections = (coded_values, values - coded_values)
    return 2 * (members - 1) * sum(-(-count // (members * pieces)) for count in sections)
