"""Coded parts: the state of a stage as a stream of coded pieces, from which the receiver makes the whole part file.

A part is coded against a part that the receiver has (*reference*), so that differences suffice. Sender and receiver get
the same file from it, bit for bit, and the sender knows its hash: it is the reference of the next part. Each difference
is to what the receiver has and not to what was sent, so that rounding errors do not add up. The bytes:

    8       MAGIC, which no safetensors file begins with
    4       length of the preamble
    ...     preamble, JSON: coding, size_bytes of the part, replica and sha256 of the reference (0 and "" without one)
    ...     the header of the part, as in the file
    then for each mebibyte of each tensor, in the order of the file:
    1       form of the piece; the highest bit is set if its bytes are deflated
    4       length
    ...     the piece
    32      sha256 of the decoded part

It is no safetensors file, because the length of a coded piece is known only once it is coded, and the receiver decodes
each piece as it arrives. Both sides have two pieces in memory at a time.

On failure: PeerError when the stream is not one that `encode_part` writes, needs a reference that is not here, or does
not decode to the part that the sender has.
"""

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from ravnest.errors import PeerError
from ravnest.safe_json import read_json
from ravnest.state.codings import check_coding, treatment
from ravnest.state.pieces import MAX_CODED_BYTES, CodedPiece, Form, decode_piece, encode_piece
from ravnest.state.reader import LENGTH_BYTES, PartLayout, PartReader, header_bytes

MAGIC: Final = b"RAVSTATE"
_NUMBER_BYTES: Final = 4
_MAX_PREAMBLE_BYTES: Final = 1024
_DEFLATED: Final = 0x80
_HASH_BYTES: Final = 32

Write = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Preamble:
    """The description of a coded part, in front of its pieces."""

    coding: str
    size_bytes: int
    """Size of the decoded part."""
    replica: int = 0
    """The number of the reference; 0 without one."""
    sha256: str = ""
    """The hash of the reference."""

    def to_json(self) -> bytes:
        fields = {"coding": self.coding, "size_bytes": self.size_bytes, "replica": self.replica, "sha256": self.sha256}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Preamble":
        """PeerError when it is invalid."""
        try:
            fields = read_json(text)
            if not isinstance(fields, dict) or fields.keys() != cls.__dataclass_fields__.keys():
                raise ValueError("it has other fields")
            found = cls(**fields)
            if not all(type(each) is int and 0 <= each < 1 << 63 for each in (found.size_bytes, found.replica)):
                raise ValueError("a size or a number is none")
            if not isinstance(found.coding, str) or not isinstance(found.sha256, str):
                raise ValueError("a field has the wrong type")
        except ValueError as error:
            raise PeerError(f"the preamble of a coded part cannot be read: {error}") from None
        check_coding(found.coding)
        return found


def encode_part(
    part: PartReader, preamble: Preamble, reference: PartReader | None, write: Write, write_decoded: Write
) -> str:
    """Writes a part as a coded one, and also what the receiver decodes from it. Returns the sha256 of all bytes of the
    part as they were read, so that the caller notices a damaged file."""
    header, text = part.layout.header, preamble.to_json()
    write(MAGIC + len(text).to_bytes(_NUMBER_BYTES, "little") + text + header)
    write_decoded(header)
    read, decoded = hashlib.sha256(header), hashlib.sha256(header)
    for place in part.layout.pieces():
        piece = part.read(place)
        copy = None if reference is None else reference.same_place(place)
        values = (place.tensor.end - place.tensor.begin) // 4
        how = treatment(preamble.coding, place.tensor.name, values)
        coded = encode_piece(piece, place.is_float32, how, copy)
        received = decode_piece(coded, place.size_bytes, copy).numpy().tobytes()
        read.update(piece.numpy().data)
        decoded.update(received)
        form = coded.form | (_DEFLATED if coded.is_deflated else 0)
        write(bytes([form]) + len(coded.data).to_bytes(_NUMBER_BYTES, "little") + coded.data)
        write_decoded(received)
    write(decoded.digest())
    return read.hexdigest()


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """Destination of a decoded part, and the reference that it needs."""

    write: Write
    reference: PartReader | None


class PartDecoder:
    """Decodes a coded part from its bytes as they arrive."""

    def __init__(self, begin: Callable[[Preamble], DecodeTarget]) -> None:
        """`begin` is called once, when the preamble has arrived; it checks the size and finds the reference."""
        self._begin = begin
        self._buffer = bytearray()
        self._steps = self._parse()
        self._wanted = next(self._steps)
        self._is_over = False
        self.sha256 = ""
        """The hash of the decoded part, once it is complete."""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the bytes that follow."""
        self._buffer += data
        begin = 0
        while not self._is_over and len(self._buffer) - begin >= self._wanted:
            end = begin + self._wanted
            try:
                self._wanted = self._steps.send(bytes(self._buffer[begin:end]))
            except StopIteration:
                self._is_over = True
            begin = end
        del self._buffer[:begin]
        if self._is_over and self._buffer:
            raise PeerError("a coded part is longer than its pieces")

    def finish(self) -> str:
        """All bytes were fed: the hash of the decoded part."""
        if not self._is_over:
            raise PeerError("a coded part ends before its last piece")
        return self.sha256

    def _parse(self) -> Generator[int, bytes, None]:
        """Yields the number of bytes that it needs next, and gets them."""
        if (yield len(MAGIC)) != MAGIC:
            raise PeerError("a coded part does not begin as one")
        length = int.from_bytes((yield _NUMBER_BYTES), "little")
        if not 0 < length <= _MAX_PREAMBLE_BYTES:
            raise PeerError(f"a coded part announces a preamble of {length} bytes")
        preamble = Preamble.from_json((yield length))
        target = self._begin(preamble)
        first = yield LENGTH_BYTES
        rest = header_bytes(first, preamble.size_bytes) - LENGTH_BYTES
        layout = PartLayout.of(first + ((yield rest) if rest else b""), preamble.size_bytes)
        target.write(layout.header)
        digest = hashlib.sha256(layout.header)
        for place in layout.pieces():
            head = yield 1 + _NUMBER_BYTES
            length = int.from_bytes(head[1:], "little")
            if length > MAX_CODED_BYTES:
                raise PeerError(f"a piece of a coded part has {length} bytes, more than {MAX_CODED_BYTES}")
            coded = CodedPiece(
                _form(head[0] & ~_DEFLATED), bool(head[0] & _DEFLATED), (yield length) if length else b""
            )
            copy = None if target.reference is None else target.reference.same_place(place)
            if coded.form not in (Form.RAW, Form.SAME) and not place.is_float32:
                raise PeerError(f"a piece of {place.tensor.name[:80]!r}, which is not float32, is coded as such")
            piece = decode_piece(coded, place.size_bytes, copy).numpy().data
            digest.update(piece)
            target.write(bytes(piece))
        if (yield _HASH_BYTES) != digest.digest():
            raise PeerError("a coded part decodes to other bytes here than at its sender")
        self.sha256 = digest.hexdigest()


def _form(number: int) -> Form:
    try:
        return Form(number)
    except ValueError:
        raise PeerError(f"a coded part has a piece of the unknown form {number}") from None
