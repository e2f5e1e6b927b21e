"""How a ring cuts its vector: a segment for each member, each segment in pieces that travel one by one.

Both sections are cut into as many segments as there are members, by count; a segment is its part of the coded section
and its part of the plain one. A piece lies within one section. Every member computes the same cut from the same sizes.
"""

from typing import Final, NamedTuple

_PIECES_PER_SEGMENT: Final = 16
"""So that sending, adding and receiving overlap, while there is something to overlap."""
_FEWEST_VALUES: Final = 4_096
_MAX_VALUES: Final = 262_144
"""1 MiB of float32: what one operation leaves in the cache the next one finds there."""


class PieceSpan(NamedTuple):
    """Where a piece lies in the vector."""

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
        """How many pieces a segment has; none where there are fewer values than members."""
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


def default_piece_values(values: int, members: int) -> int:
    """A sixteenth of a segment, within limits, and a multiple of the smallest piece: codecs work in blocks."""
    per_segment = -(-values // members)
    pieces = -(-per_segment // (_PIECES_PER_SEGMENT * _FEWEST_VALUES))
    return min(max(pieces, 1) * _FEWEST_VALUES, _MAX_VALUES)
