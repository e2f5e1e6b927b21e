"""Interface of the codecs, and their registry by name.

| name | bytes per value | precision |
|---|---:|---|
| float32 | 4 | lossless |
| lossless | about 3.4 | lossless |
| float16 | 2 | 11 bits from 6e-5 to 65504; smaller values have fewer bits, larger ones become 65504 |
| bfloat16 | 2 | 8 bits |
| int8 | 1.02 | error of at most 1/254 of the largest value in a block of 256; rings use error feedback |
| int4 | 0.53 | error of at most 1/14 of the largest value in a block of 64, for senders with error feedback |

Encoded bytes are a wire format: little-endian, and the same on every machine. All codecs are stateless, so several
threads may use them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import Tensor

from ravnest.codecs.float32 import Float32Codec
from ravnest.codecs.half import HalfCodec
from ravnest.codecs.int4 import Int4Codec
from ravnest.codecs.int8 import Int8Codec
from ravnest.codecs.lossless import LosslessCodec
from ravnest.errors import PeerError


class Codec(Protocol):
    """Turns a flat float32 tensor into bytes and back."""

    name: str
    """The name in settings, in messages and in `CODECS`."""
    lossy: bool
    """Whether decoded values may differ from the original ones."""
    varies: bool
    """Whether the encoded size depends on the values, so that it must be sent with them."""
    feedback: bool
    """Whether a ring adds the error to the values of its next round: where a block shares a scale, the small values of
    the block would otherwise be lost for good."""
    block: int
    """The number of values that share a scale; 1 where each value is encoded by itself."""
    largest: float
    """The largest absolute value; larger ones are clamped to it."""

    def size_bytes(self, count: int) -> int:
        """The size of `count` encoded values: exact, or the maximum for a codec that varies."""

    def encode(self, values: Tensor) -> Tensor:
        """`values` (flat, contiguous, detached, float32) as a flat uint8 tensor on the same device or on the CPU, which
        may share their memory. int4 accepts values on the CPU only.

        Finite values decode to finite values. The caller checks that the values are finite. The result of a quantising
        codec for other values is unspecified, but it decodes to finite values or is refused.
        """

    def decode(self, data: Tensor, count: int) -> Tensor:
        """`count` values (flat float32) from a flat uint8 tensor on the same device, whose memory they may share.

        The result has the same bits on every machine. PeerError: the size is wrong, or no encoder of this codec writes
        such bytes. A quantising codec returns finite values only. A float codec returns the values that were sent; a
        caller that cannot use NaN or infinity must check for them.
        """

    def error(self, largest: float) -> float:
        """The maximum error of a decoded value if no absolute value exceeds `largest`."""


PLAIN: Final[Codec] = Float32Codec()
"""The codec without any encoding."""

_ALL: Final[tuple[Codec, ...]] = (
    PLAIN,
    LosslessCodec(),
    HalfCodec("float16", torch.float16),
    HalfCodec("bfloat16", torch.bfloat16),
    Int8Codec(),
    Int4Codec(),
)
CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})


def codec_named(name: str) -> Codec:
    """The codec of this name. PeerError if there is none, because the name comes from a peer."""
    codec = CODECS.get(name)
    if codec is None:
        raise PeerError(f"there is no codec {name[:80]!r}; use one of {', '.join(CODECS)}")
    return codec
