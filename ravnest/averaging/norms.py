"""Norms: of what a member contributes, of the pieces that arrive, and how large those may be.

A partial sum of vectors is no longer than their norms together, so a receiver who knows the norms that everybody
declared can tell a sender who puts in more. Codecs blur that: what they may add is allowed for, generously, because a
refused honest member costs the round and a small excess costs next to nothing.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.codec import Codec

_ROUNDING: Final = 1.01
"""For sums and norms in float32."""
_SLACK: Final = 1e-12
_BLOCK: Final = 64
"""Values that share a scale in the coarsest codec. int8 has 256, which doubles its share; see `codec_error`."""
_PART_VALUES: Final = 1 << 18


def squared_norm(values: Tensor) -> float:
    """The sum of squares of flat float32 values; infinity if, and only if, one of them is not finite."""
    square = float(torch.dot(values, values))
    if math.isfinite(square):
        return square
    # Squares of finite values may overflow float32; in float64 they cannot.
    return float(values.double().square_().sum()) if bool(torch.isfinite(values).all()) else math.inf


def norm(values: Tensor) -> float:
    """The length of a flat float32 vector; infinity if, and only if, one of its values is not finite."""
    # A part at a time: sums in float32 stay short, and where squares overflow the float64 copy stays small.
    parts = range(0, values.numel(), _PART_VALUES)
    return math.sqrt(math.fsum(squared_norm(values[part : part + _PART_VALUES]) for part in parts))


def codec_error(codec: Codec) -> float:
    """How long the error of encoding a vector once may be, as a part of the vector's length.

    The worst case: every block holds one value as large as its scale, and all others are off by the most that can be.
    Then a block of b values errs by sqrt(b) times the error of one, relative to its largest value and hence to the
    block's length. The factor 2 where the error is fed back into nothing covers blocks four times as large.
    """
    if not codec.lossy:
        return 0.0
    worst = math.sqrt(_BLOCK) * codec.error(1.0)
    return worst if codec.feedback else 2 * worst


def allowed_norm(codec: Codec, shares: Sequence[float], carried: float, values: int) -> float:
    """How long a sum of contributions with the lengths `shares` may be when it arrives.

    Every contributor encoded the sum once. `carried`: how long the residual may be that each of them had left from
    earlier rounds, for a codec with feedback; `values`: in all of the coded section.
    """
    total = math.fsum(shares)
    once = codec_error(codec) * total + (codec.error(0.0) * math.sqrt(values) if codec.lossy else 0.0)
    lost = len(shares) * once
    return _ROUNDING * total + lost + len(shares) * carried + _SLACK


def carried_norm(codec: Codec, before: float, total: float) -> float:
    """How long a member's residual may be after a round whose contributions were `total` long together.

    What is lost is an error of what came plus the residual before, so an old residual fades.
    """
    return codec_error(codec) * (total + before) if codec.feedback else 0.0
