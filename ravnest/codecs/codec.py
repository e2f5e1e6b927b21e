"""What a codec is, and all of them by name.

| name | bytes a value | what it keeps |
|---|---:|---|
| float32 | 4 | everything |
| lossless | about 3.4 | everything |
| float16 | 2 | 11 bits of every value from 6e-5 to 65504; smaller ones coarser, larger ones become 65504 |
| bfloat16 | 2 | 8 bits of every value |
| int8 | 1.02 | 1/254 of the largest of 256 neighbours |
| int4 | 0.53 | 1/14 of the largest of 64 neighbours; what it loses is for the sender to send next time |

Encoded bytes are a wire format: little-endian, and the same on every machine. All codecs are stateless, hence safe to
use from several threads.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from torch import Tensor

from ravnest.codecs.bfloat16 import BFloat16Codec
from ravnest.codecs.float16 import Float16Codec
from ravnest.codecs.float32 import Float32Codec
from ravnest.codecs.int4 import Int4Codec
from ravnest.codecs.int8 import Int8Codec
from ravnest.codecs.lossless import LosslessCodec
from ravnest.errors import PeerError


class Codec(Protocol):
    """Turns a flat float32 tensor into bytes and back."""

    @property
    def name(self) -> str:
        """The same in settings, in messages and in `CODECS`."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether decoded values may differ from those that were encoded."""
        ...

    @property
    def varies(self) -> bool:
        """Whether the size depends on the values: then it has to travel with them."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether so much is lost that a sender is to keep it and to add it to what it sends next."""
        ...

    @property
    def largest(self) -> float:
        """No absolute value above this is kept: it becomes this."""
        ...

    def size_bytes(self, count: int) -> int:
        """The exact size of `count` values encoded; of a codec that varies, the most it can be."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """`values` (flat, contiguous, detached, float32) as a flat uint8 tensor, which may share their memory. It
        is on the same device, or on the CPU. Codecs with feedback take values on the CPU alone.

        Finite values decode to finite values. The caller has checked that they are finite: what a quantising codec
        makes of others is not specified, except that it decodes to finite values or is refused.
        """
        ...

    def decode(self, data: Tensor, count: int) -> Tensor:
        """`count` values (flat float32) out of a flat uint8 tensor on the same device, whose memory they may share.

        Every machine gets the same bits. PeerError: the bytes are too few or too many, or no encoder of this codec
        makes them. A quantising codec gives finite values only; one of the float codecs gives those that were
        sent, and a caller who cannot use NaN or infinity looks for them.
        """
        ...

    def error(self, largest: float) -> float:
        """How far a decoded value may be from its original where no absolute value exceeds `largest`."""
        ...


PLAIN: Final[Codec] = Float32Codec()
"""Values as they are."""

_ALL: Final[tuple[Codec, ...]] = (
    PLAIN,
    LosslessCodec(),
    Float16Codec(),
    BFloat16Codec(),
    Int8Codec(),
    Int4Codec(),
)
CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})


def codec_named(name: str) -> Codec:
    """The codec of that name; PeerError where there is none, for the name comes from whom we exchange bytes with."""
    codec = CODECS.get(name)
    if codec is None:
        raise PeerError(f"there is no codec {name[:80]!r}; use one of {', '.join(CODECS)}")
    return codec
