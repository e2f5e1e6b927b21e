"""Norms of contributions and of arriving pieces, and upper bounds for them.

A partial sum of vectors is no longer than the sum of their norms. A receiver that knows the norms that all members
declared can therefore detect a sender that adds more. Lossy codecs blur the comparison. The bounds allow generously for
their errors, because refusing an honest member costs the round while a small excess costs next to nothing.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ravnest.averaging.segments import RingPosition
from ravnest.codecs.codec import Codec
from ravnest.errors import PeerError

_ROUNDING: Final = 1.01
"""Allowance for rounding in float32 sums and norms."""
_SLACK: Final = 1e-12
_MIN_BLOCK: Final = 64
"""Block size that the bounds allow for at least, also for a codec that encodes each value by itself."""
_PART_VALUES: Final = 1 << 18
_PER_HOP: Final = 1.001
"""Growth of the bound from hop to hop. Machines sum squares in different orders, and a piece that one member accepts
must be accepted by the next one too."""


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
    """The largest error of encoding a vector once, as a fraction of the vector's length.

    In the worst case every block holds one value as large as its scale, and all other values are rounded by the
    maximum. The error of a block of b values is then sqrt(b) times the error of one value, relative to the block's
    largest value and so to the block's length.
    """
    return math.sqrt(max(codec.block, _MIN_BLOCK)) * codec.error(1.0) if codec.lossy else 0.0


def allowed_norm(codec: Codec, shares: Sequence[float], residual_norm: float, values: int) -> float:
    """The largest length at which a sum of contributions with the lengths `shares` may arrive.

    Every contributor encoded the sum once. `residual_norm`: the largest residual that each of them may have kept from
    earlier rounds, for a codec with feedback; `values`: the size of the whole coded section.
    """
    total = math.fsum(shares)
    once = codec_error(codec) * total + (codec.error(0.0) * math.sqrt(values) if codec.lossy else 0.0)
    lost = len(shares) * once
    return _ROUNDING * total + lost + len(shares) * residual_norm + _SLACK


def next_residual_norm(codec: Codec, before: float, total: float) -> float:
    """The largest residual of a member after a round whose contributions had the length `total` together.

    Encoding loses a fraction of what arrived plus the residual before, so an old residual fades.
    """
    return codec_error(codec) * (total + before) if codec.feedback else 0.0


class NormBounds:
    """The lengths that a member accepts in one attempt: for each hop, the coded pieces together may not be longer.

    The pieces of different hops are not added up. The next hop brings the work of other members, and a piece that one
    member accepts must not make the next member blame it.
    """

    def __init__(self, position: RingPosition, codec: Codec, residual_norm: float, coded_values: int) -> None:
        """`residual_norm`: see `allowed_norm`."""
        shares = position.declared_lengths
        if codec.feedback:
            # A member that has just joined cannot know the others' residuals: at least what this round may leave them.
            residual_norm = max(residual_norm, 2 * codec_error(codec) * position.declared_length)
        bounds = []
        for hop in range(position.hops):
            contributors = min(hop + 1, position.members)
            arriving = [shares[(position.index - 1 - back) % position.members] for back in range(contributors)]
            bounds.append(allowed_norm(codec, arriving, residual_norm, coded_values) * _PER_HOP**hop)
        self.by_hop: Sequence[float] = tuple(bounds)
        self._squares = [0.0] * len(bounds)

    def add(self, hop: int, square: float) -> None:
        """Count the squared length of one more piece; PeerError when the hop exceeds its bound."""
        self._squares[hop] += square
        length, bound = math.sqrt(self._squares[hop]), self.by_hop[hop]
        if length > bound:
            raise PeerError(
                f"the sum that came on hop {hop} has a norm of at least {length:.4g}, but by the norms that "
                f"its contributors declared it is at most {bound:.4g}"
            )
