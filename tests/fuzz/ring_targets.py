"""Targets for data from another owner of a ring: the bytes of a direct line, and the pieces in a reduce."""

import socket
from functools import cache
from typing import Any, cast

import torch

from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.averaging.segments import RingPosition
from ravnest.codecs.codec import CODECS
from ravnest.net.direct_line import PIECE_BYTES, DirectLine
from ravnest.net.frames.frames import RingPlace
from tests.fuzz.rule import Target

_VALUES, _CODED = 90, 70


class _Bytes:
    """A connection that delivers these bytes, then ends, and records the data sent to it."""

    def __init__(self, data: bytes = b"") -> None:
        self._left = data
        self.sent = b""

    def recv_into(self, memory: memoryview) -> int:
        count = min(len(memory), len(self._left))
        memory[:count], self._left = self._left[:count], self._left[count:]
        return count

    def sendall(self, data: Any) -> None:
        self.sent += bytes(data)


def _line(connection: _Bytes) -> DirectLine:
    return DirectLine(cast(socket.socket, connection), "a peer")


def _receive(data: bytes) -> None:
    line = _line(_Bytes(data))
    while (piece := line.receive()) is not None:
        _, _, values = piece
        assert values.dtype == torch.uint8 and values.dim() == 1 and values.numel() <= PIECE_BYTES


@cache
def _own() -> torch.Tensor:
    return torch.linspace(-1, 1, _VALUES)


def _member(index: int) -> RingReduce:
    position = RingPosition(index, [0.2, 0.3, 0.5], [10.0] * 3)
    return RingReduce(_own(), _CODED, position, CODECS["int8"], piece_values=8)


def _reduce(data: bytes) -> None:
    member, line = _member(0), _line(_Bytes(data))
    list(member.start())

    def room(generation: int, place: RingPlace, size_bytes: int) -> torch.Tensor | None:
        return member.room(place.hop, place.segment, place.chunk, size_bytes)

    while (piece := line.receive(room)) is not None:
        _, place, values = piece
        member.receive(Piece(place.hop, place.segment, place.chunk, values))


def _seeds() -> list[bytes]:
    """The first pieces that the previous member sends."""
    connection = _Bytes()
    line = _line(connection)
    for piece in _member(2).start():
        line.send(1, RingPlace(1, 0, 1, piece.hop, piece.segment, piece.chunk), piece.data)
    first = connection.sent
    line.send(1, RingPlace(1, 0, donation=True, last=True), torch.zeros(8, dtype=torch.uint8))
    return [first, connection.sent]


TARGETS = (Target("direct_line", _receive, _seeds), Target("ring_pieces", _reduce, _seeds))
