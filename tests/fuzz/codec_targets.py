"""Values that another member of a ring, or a neighbour stage, has encoded."""

from collections.abc import Callable

import torch

from ravnest.codecs.codec import CODECS, Codec
from ravnest.errors import PeerError
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


TARGETS = tuple(Target(f"codec_{name}", _decode(codec), _seeds(codec)) for name, codec in CODECS.items())
