"""Reader of a part file: a stage's state in safetensors format, read in pieces from wherever it lies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ravnest.errors import GraphError, PeerError
from ravnest.graph.weights import MAX_HEADER_BYTES, TensorEntry, parse_header
from ravnest.state.pieces import PIECE_BYTES

LENGTH_BYTES: Final = 8
"""The length of the header is in the first bytes of a safetensors file."""

ReadAt = Callable[[int, int], bytes]
"""Reads this number of bytes at this offset of a file; PeerError when it cannot."""


@dataclass(frozen=True, slots=True)
class PartPiece:
    """Some bytes of one tensor of a part."""

    tensor: TensorEntry
    begin: int
    """Offset in the data of the file, which follows the header."""
    size_bytes: int

    @property
    def is_float32(self) -> bool:
        return self.tensor.dtype is torch.float32

    @property
    def offset_in_tensor(self) -> int:
        return self.begin - self.tensor.begin


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The header of a part, and the tensors that it names."""

    header: bytes
    """With the length in front of it: the beginning of the file."""
    tensors: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, header: bytes, size_bytes: int) -> "PartLayout":
        """From the beginning of a file of this size; PeerError when it is invalid."""
        try:
            tensors, _ = parse_header(header[LENGTH_BYTES:], size_bytes - len(header))
        except GraphError as error:
            raise PeerError(str(error)) from None
        return cls(header, tuple(tensors))

    def pieces(self) -> Iterator[PartPiece]:
        """All bytes after the header, in their order."""
        for tensor in self.tensors:
            for begin in range(tensor.begin, tensor.end, PIECE_BYTES):
                yield PartPiece(tensor, begin, min(PIECE_BYTES, tensor.end - begin))


def header_bytes(first: bytes, size_bytes: int) -> int:
    """The size of the beginning of a part file, from its first LENGTH_BYTES; PeerError when that cannot be."""
    size = LENGTH_BYTES + int.from_bytes(first, "little")
    if len(first) != LENGTH_BYTES or size > min(MAX_HEADER_BYTES, size_bytes):
        raise PeerError(f"a part of {size_bytes} bytes cannot have a header of {size} bytes")
    return size


class PartReader:
    """Reads the pieces of one part file. Any thread may use it, one at a time."""

    def __init__(self, read_at: ReadAt, size_bytes: int) -> None:
        """PeerError when it is no such file."""
        self._read_at = read_at
        size = header_bytes(read_at(0, LENGTH_BYTES), size_bytes)
        self.size_bytes = size_bytes
        self.layout = PartLayout.of(read_at(0, size), size_bytes)
        self._by_name = {tensor.name: tensor for tensor in self.layout.tensors}

    def read(self, piece: PartPiece) -> Tensor:
        """The bytes of a piece of this file, flat; PeerError when they cannot be read."""
        return self._bytes(piece.begin, piece.size_bytes)

    def same_place(self, piece: PartPiece) -> Tensor | None:
        """The bytes that this file has in the place of a piece of another file; None if its tensor is another one."""
        own = self._by_name.get(piece.tensor.name)
        if own is None or (own.dtype, own.shape) != (piece.tensor.dtype, piece.tensor.shape):
            return None
        return self._bytes(own.begin + piece.offset_in_tensor, piece.size_bytes)

    def _bytes(self, begin: int, size_bytes: int) -> Tensor:
        data = self._read_at(len(self.layout.header) + begin, size_bytes)
        if len(data) != size_bytes:
            raise PeerError("a part ends too early on the disk here; use another replica")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
