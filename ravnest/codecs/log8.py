"""log8: one byte per value with about the same relative error for large and small values, for an optimizer's moments.

Adam divides one moment by the root of the other, so a small second moment matters as much as a large one, and it must
never become 0. Each block of 256 values has its largest absolute value as its scale, and levels whose logarithms are
equally far apart: as near to each other as the range of the block allows. The bytes, for `count` values:

    blocks = ceil(count / 256)
    4 * blocks    scales, float32: the largest absolute value of each block
    blocks        steps, uint8: the distance between two levels of a block, in 1/64 octaves
    count         codes

    without sign  0 is the value 0; 1 to 255 is scale * 2 ** (-(255 - code) * step / 64)
    with sign     the highest bit is the sign; the others are 0 for the value 0, or 1 to 127 for
                  scale * 2 ** (-(127 - code) * step / 64)

Without sign, only 0 becomes 0: smaller values than the lowest level are rounded up to it. Decoding uses one table and
one multiplication, so that every machine gets the same bits.
"""

import math
from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.layout import LARGEST, SMALLEST_NORMAL, bytes_of, check_scales, check_size, numbers
from ravnest.errors import PeerError

BLOCK: Final = 256
_PARTS: Final = 64
"""Parts of an octave in which steps are counted."""


class Log8Codec:
    """Finite float32 values, with a sign or without, in 1.02 bytes each. Stateless."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self._top = 127 if signed else 255
        # A signed value far below the largest of its block hardly matters, and finer levels for the others do.
        self._max_step = 8 if signed else 16
        exponents = range(self._top * self._max_step + 1)
        self._table = torch.tensor([_power(exponent) for exponent in exponents], dtype=torch.float32)

    @property
    def error(self) -> float:
        """The maximum relative error of a value between the lowest level of its block and the largest value."""
        return 2 ** (self._max_step / _PARTS / 2) - 1 + 1e-4

    def size_bytes(self, count: int) -> int:
        return 5 * _blocks(count) + count

    def encode(self, values: Tensor) -> Tensor:
        """`values` (flat, float32, finite, on the CPU; none below 0 without a sign) as bytes."""
        count = values.numel()
        rows = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
        sizes = rows.abs().clamp_(max=LARGEST)
        is_zero = sizes == 0
        sizes.clamp_(min=SMALLEST_NORMAL)
        scales = sizes.amax(dim=1, keepdim=True)
        # Octaves below the largest value; zeros do not count for the range.
        octaves = scales.log2().sub(sizes.log2_()).masked_fill_(is_zero, 0.0).clamp_(min=0)
        widest = octaves.amax(dim=1, keepdim=True)
        steps = widest.mul_(_PARTS / (self._top - 1)).ceil_().clamp_(1, self._max_step)
        levels = octaves.mul_(_PARTS).div_(steps).round_().neg_().add_(self._top)
        # With a sign, a value below the lowest level becomes 0; without, the lowest level.
        levels.clamp_(min=0 if self.signed else 1).masked_fill_(is_zero, 0.0)
        codes = levels.to(torch.uint8)
        if self.signed:
            codes.add_((rows < 0).logical_and_(codes > 0).to(torch.uint8).mul_(128))
        parts = bytes_of(scales.view(-1)), steps.view(-1).to(torch.uint8), codes.view(-1)[:count]
        return torch.cat(parts)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """`count` values from these bytes, finite whatever the bytes are; PeerError when no encoder writes them."""
        check_size("log8", data, count, self.size_bytes(count))
        if not count:
            return torch.empty(0)
        blocks = _blocks(count)
        scales = numbers(data[: 4 * blocks], torch.float32)
        check_scales("log8", scales, LARGEST)
        steps = data[4 * blocks : 5 * blocks]
        low, high = torch.aminmax(steps)
        if int(low) < 1 or int(high) > self._max_step:
            raise PeerError("a step in log8 is not one that an encoder writes: the bytes are damaged or forged")
        codes = torch.nn.functional.pad(data[5 * blocks :], (0, blocks * BLOCK - count)).view(blocks, BLOCK)
        levels = codes.bitwise_and(127) if self.signed else codes
        exponents = levels.to(torch.int32).neg_().add_(self._top).mul_(steps.to(torch.int32).unsqueeze(1))
        values = self._table.index_select(0, exponents.view(-1)).view(blocks, BLOCK).mul_(scales.unsqueeze(1))
        # Some machines compute smaller numbers as 0.
        values.clamp_(min=SMALLEST_NORMAL).masked_fill_(levels == 0, 0.0)
        if self.signed:
            values = torch.where(codes > 127, -values, values)
        return values.view(-1)[:count]


def _power(exponent: int) -> float:
    """2 ** (-exponent / 64), such that whole octaves below have the same digits."""
    octaves, rest = divmod(exponent, _PARTS)
    return math.ldexp(float(torch.tensor(2.0 ** (-rest / _PARTS), dtype=torch.float32)), -octaves)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


SIGNED: Final = Log8Codec(signed=True)
UNSIGNED: Final = Log8Codec(signed=False)
