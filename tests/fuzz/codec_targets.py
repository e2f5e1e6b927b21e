"""Values that another member of a ring, or a neighbour stage, has encoded, and coded parts of replicas."""

from collections.abc import Callable

import torch

from ravnest.codecs.codec import CODECS, Codec
from ravnest.codecs.log8 import SIGNED, UNSIGNED, Log8Codec
from ravnest.errors import PeerError
from ravnest.graph.weights import stream_tensors
from ravnest.state.coded_part import DecodeTarget, PartDecoder, Preamble, encode_part
from ravnest.state.codings import INT8, LOSSLESS
from ravnest.state.reader import PartReader
from tests.fuzz.rule import Target

_COUNTS = (0, 1, 7, 64, 257, 600)


def _decode(codec: Codec) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        refused = None
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for count in _COUNTS:
            try:
                values = codec.decode(flat, count)
            except PeerError as error:
                refused = refused or error
            else:
                assert values.shape == (count,) and values.dtype == torch.float32
                assert "int" not in codec.name or values.isfinite().all()
                return
        if refused is not None:
            raise refused

    return decode


def _seeds(codec: Codec) -> Callable[[], list[bytes]]:
    return lambda: [codec.encode(torch.linspace(-3, 4, count)).numpy().tobytes() for count in _COUNTS]


def _decode_part(data: bytes) -> None:
    decoder = PartDecoder(lambda preamble: DecodeTarget(lambda piece: None, _reader(_part(0.0))))
    decoder.feed(data)
    decoder.finish()


def _coded_parts() -> list[bytes]:
    return [_coded(coding, reference) for coding in (LOSSLESS, INT8) for reference in (None, _part(0.0))]


def _coded(coding: str, reference: bytes | None) -> bytes:
    part, found = _part(0.01), bytearray()
    known = None if reference is None else _reader(reference)
    encode_part(_reader(part), Preamble(coding, len(part)), known, found.extend, lambda piece: None)
    return bytes(found)


def _part(distance: float) -> bytes:
    values = torch.linspace(-1, 1, 4100)
    tensors = {
        "param:w": values + distance * values.square(),
        "optim:w:exp_avg": values * (1 + distance),
        "optim:w:exp_avg_sq": values.square() * (1 + distance),
        "buffer:n": torch.tensor(3),
    }
    return b"".join(stream_tensors(tensors, {"version": "1"}))


def _reader(part: bytes) -> PartReader:
    return PartReader(lambda offset, size: part[offset : offset + size], len(part))


def _decode_log8(codec: Log8Codec) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        count = len(data) * 256 // 261
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        assert codec.decode(flat, count).isfinite().all()

    return decode


TARGETS = (
    *(Target(f"codec_{name}", _decode(codec), _seeds(codec)) for name, codec in CODECS.items()),
    *(
        Target(
            f"log8_{name}", _decode_log8(codec), lambda codec=codec: [codec.encode(torch.ones(256)).numpy().tobytes()]
        )
        for name, codec in (("signed", SIGNED), ("unsigned", UNSIGNED))
    ),
    Target("coded_part", _decode_part, _coded_parts),
)
