"""Pieces of coded state: up to a mebibyte of one tensor's bytes, each in the form that suits it.

A coded piece names its form, so the decoder needs no rules: only the copy that the receiver has of the same bytes, for
forms that are differences to it. Decoding is deterministic: sender and receiver get the same bytes.

On failure: PeerError when a piece is not one that `encode_piece` writes. No form decodes to more than the bytes that
the piece stands for, whatever it holds.
"""

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.codec import CODECS
from ravnest.codecs.layout import bytes_of, numbers
from ravnest.codecs.log8 import SIGNED, UNSIGNED
from ravnest.errors import PeerError
from ravnest.state.codings import Treatment

PIECE_BYTES: Final = 1 << 20
MAX_CODED_BYTES: Final = PIECE_BYTES + (64 << 10)
"""Maximum size of a coded piece: no form makes a piece much longer."""

_INT8: Final = CODECS["int8"]
_LOSSLESS: Final = CODECS["lossless"]
_RAW_DEFLATE: Final = -15
_MEMORY_LEVEL: Final = 9
_PLANES: Final = 4


class Form(IntEnum):
    """The ways in which a piece is coded."""

    RAW = 0
    SAME = 1
    """The receiver's copy is equal: no bytes."""
    LOSSLESS = 2
    LOSSLESS_DIFFERENCE = 3
    INT8_DIFFERENCE = 4
    SIGNED_LOG8 = 5
    LOG8 = 6


@dataclass(frozen=True, slots=True)
class CodedPiece:
    """The form of a piece, whether its bytes are deflated, and the bytes."""

    form: Form
    is_deflated: bool
    data: bytes


def encode_piece(piece: Tensor, is_float32: bool, treatment: Treatment, copy: Tensor | None) -> CodedPiece:
    """A piece (flat uint8) in the shortest form that the treatment allows. `copy`: what the receiver has instead.

    Values that are not finite, and negative squares, are coded bit for bit.
    """
    if copy is not None and torch.equal(piece, copy):
        return CodedPiece(Form.SAME, False, b"")
    if is_float32:
        values = numbers(piece, torch.float32)
        if treatment is not Treatment.EXACT and bool(torch.isfinite(values).all()):
            rounded = _rounded(values, treatment, None if copy is None else numbers(copy, torch.float32))
            if rounded is not None:
                return rounded
        if 2 * int(torch.count_nonzero(values)) < values.numel():
            return _deflated(Form.RAW, piece)
        found = _lossless(values, None if copy is None else numbers(copy, torch.float32))
        if len(found.data) < piece.numel():
            return found
    return _deflated(Form.RAW, piece)


def decode_piece(coded: CodedPiece, size_bytes: int, copy: Tensor | None) -> Tensor:
    """The `size_bytes` bytes (flat uint8) that a piece stands for; PeerError when it is damaged or forged."""
    form, count = coded.form, size_bytes // 4
    if form in _WITH_COPY and copy is None:
        raise PeerError("a piece of coded state is a difference to a tensor that is not here")
    if form is Form.SAME:
        assert copy is not None
        return copy
    if form is Form.RAW:
        return _unpacked(coded, size_bytes)
    if size_bytes % 4:
        raise PeerError("a piece of coded state that is not float32 is coded as such")
    if form is Form.LOSSLESS:
        return bytes_of(_LOSSLESS.decode(_tensor(coded.data), count))
    if form is Form.LOSSLESS_DIFFERENCE:
        assert copy is not None
        return bytes_of(_plus(_joined_planes(coded.data, count), copy))
    if form is Form.INT8_DIFFERENCE:
        assert copy is not None
        difference = _INT8.decode(_unpacked(coded, _INT8.size_bytes(count)), count)
        # In this order on every machine: the product of step and scale is rounded before it is added.
        return bytes_of(difference.add_(numbers(copy, torch.float32)))
    codec = SIGNED if form is Form.SIGNED_LOG8 else UNSIGNED
    return bytes_of(codec.decode(_unpacked(coded, codec.size_bytes(count)), count).contiguous())


_WITH_COPY: Final = frozenset({Form.SAME, Form.LOSSLESS_DIFFERENCE, Form.INT8_DIFFERENCE})


def _rounded(values: Tensor, treatment: Treatment, copy: Tensor | None) -> CodedPiece | None:
    """The values rounded as allowed; None if they cannot be."""
    if treatment is Treatment.SIGNED:
        return _deflated(Form.SIGNED_LOG8, SIGNED.encode(values))
    if treatment is Treatment.SQUARES:
        return None if bool((values < 0).any()) else _deflated(Form.LOG8, UNSIGNED.encode(values))
    if copy is None:
        return None
    difference = values - copy
    if not bool(torch.isfinite(difference).all()):
        return None
    return _deflated(Form.INT8_DIFFERENCE, _INT8.encode(difference))


def _lossless(values: Tensor, copy: Tensor | None) -> CodedPiece:
    """The shorter of the values and their difference to the copy, bit for bit."""
    if copy is not None:
        planes = _planes(values, copy)
        # Plain values take about five sixths: a difference that saves less than that is no use.
        if 5 * len(planes) < 4 * values.nbytes:
            return CodedPiece(Form.LOSSLESS_DIFFERENCE, False, planes)
    return CodedPiece(Form.LOSSLESS, False, _LOSSLESS.encode(values).numpy().tobytes())


def _planes(values: Tensor, copy: Tensor) -> bytes:
    """The differences of the values' bits as numbers with the sign in the lowest bit: small for values that are close.
    All lowest bytes first, then the next ones; each of these planes is deflated if that makes it shorter."""
    distance = values.view(torch.int32) - copy.view(torch.int32)
    folded = torch.bitwise_xor(distance << 1, distance >> 31)
    each = bytes_of(folded).view(-1, _PLANES)
    found = bytearray()
    for plane in range(_PLANES):
        coded = _deflated(Form.RAW, each[:, plane].contiguous())
        found += bytes([coded.is_deflated]) + len(coded.data).to_bytes(4, "little") + coded.data
    return bytes(found)


def _joined_planes(data: bytes, count: int) -> Tensor:
    each = torch.empty(count, _PLANES, dtype=torch.uint8)
    offset = 0
    for plane in range(_PLANES):
        size = int.from_bytes(data[offset + 1 : offset + 5], "little")
        if len(data) < offset + 5 or data[offset] > 1 or len(data) < offset + 5 + size:
            raise PeerError("a difference in coded state ends too early: the bytes are damaged or forged")
        piece = CodedPiece(Form.RAW, bool(data[offset]), data[offset + 5 : offset + 5 + size])
        each[:, plane] = _unpacked(piece, count)
        offset += 5 + size
    if offset != len(data):
        raise PeerError("a difference in coded state is too long: the bytes are damaged or forged")
    return each.view(-1).view(torch.int32)


def _plus(folded: Tensor, copy: Tensor) -> Tensor:
    # The shift of a negative number keeps its sign: the mask removes the copies of the highest bit.
    distance = torch.bitwise_xor((folded >> 1) & 0x7FFFFFFF, -(folded & 1))
    return numbers(copy, torch.int32) + distance


def _deflated(form: Form, data: Tensor) -> CodedPiece:
    """The bytes, deflated if that makes them shorter: runs of equal bytes come from weights that were not used."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY_LEVEL, zlib.Z_RLE)
    view = data.contiguous().numpy().data
    packed = packer.compress(view) + packer.flush()
    return CodedPiece(form, True, packed) if len(packed) < data.numel() else CodedPiece(form, False, view.tobytes())


def _unpacked(coded: CodedPiece, size_bytes: int) -> Tensor:
    """Exactly this number of bytes; PeerError otherwise. Takes memory for at most one byte more."""
    if not coded.is_deflated:
        found = coded.data
    else:
        unpacker = zlib.decompressobj(_RAW_DEFLATE)
        try:
            found = unpacker.decompress(coded.data, size_bytes + 1)
        except zlib.error as error:
            raise PeerError(f"a piece of coded state cannot be unpacked: {error}") from None
        if not unpacker.eof or unpacker.unused_data or unpacker.unconsumed_tail:
            raise PeerError("a piece of coded state unpacks to something else: the bytes are damaged or forged")
    if len(found) != size_bytes:
        raise PeerError(f"a piece of coded state has {len(found)} bytes instead of {size_bytes}")
    return _tensor(found)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
