"""int4: two values per byte, and a scale per block of 64 values that maps the largest absolute value to about 7.

The bytes, for `count` values:

    blocks = ceil(count / 64), half = ceil(count / 2)
    2 * blocks    scales, bfloat16, one per block
    half          byte i: the step of value i plus 8 in the low four bits, the step of value half + i plus 8 in the high
                  four bits; if count is odd, the last high bits are 8
    step          value / scale of its block, rounded to nearest, in -7..7

Values i and half + i share a byte, instead of neighbours, so that all passes run over contiguous memory. The scales are
bfloat16 because clusters average small differences, and float16 ends at 6e-8. No scale is below 1.2e-38, even if all
values are zero: smaller numbers are denormal, and some machines compute them as zero.
"""

from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.layout import (
    LARGEST,
    SMALLEST_NORMAL,
    blocks_and_scratch,
    bytes_of,
    check_scales,
    check_size,
    numbers,
)
from ravnest.errors import PeerError

BLOCK: Final = 64
_TOP: Final = 7
_MIDDLE: Final = 8
_BOTH_MIDDLES: Final = _MIDDLE * 16 + _MIDDLE
_LARGEST_SCALE: Final = float.fromhex("0x1.24p+125")
"""The largest bfloat16 of which 7 times is still finite in float32."""

assert _LARGEST_SCALE * _TOP <= LARGEST


class Int4Codec:
    """Error of about 1/14 of the largest value in a block; for senders that add the error to the next values."""

    name = "int4"
    lossy = True
    varies = False
    feedback = True
    block = BLOCK
    largest = LARGEST

    def size_bytes(self, count: int) -> int:
        return 2 * _blocks(count) + _half(count)

    def encode(self, values: Tensor) -> Tensor:
        count = values.numel()
        data = torch.empty(self.size_bytes(count), dtype=torch.uint8)
        head, half = 2 * _blocks(count), _half(count)
        scales = torch.empty(_blocks(count), dtype=torch.bfloat16)
        steps = torch.empty(_blocks(count), BLOCK, dtype=torch.int8)
        for where, rows, scratch in blocks_and_scratch(values, BLOCK):
            scale = torch.amax(torch.abs(rows, out=scratch), dim=1).mul_(1 / _TOP)
            scales[where] = scale.clamp_(SMALLEST_NORMAL, _LARGEST_SCALE)
            # Divide by the rounded scale, which the receiver will read.
            scale.copy_(scales[where]).reciprocal_()
            steps[where].copy_(torch.mul(rows, scale.unsqueeze(1), out=scratch).round_())
        data[:head].copy_(bytes_of(scales))
        flat, packed = steps.view(-1), data[head:].view(torch.int8)
        # The sums are in -119..119; one addition modulo 256 then adds 8 to both halves.
        torch.add(flat[:half], flat[half : 2 * half], alpha=16, out=packed)
        data[head:].add_(_BOTH_MIDDLES)
        return data

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        if count == 0:
            return torch.empty(0)
        head, half = 2 * _blocks(count), _half(count)
        scales, packed = numbers(data[:head], torch.bfloat16).to(torch.float32), data[head:]
        check_scales(self.name, scales, _LARGEST_SCALE)
        steps = torch.empty(2 * half, dtype=torch.uint8)
        torch.bitwise_and(packed, 15, out=steps[:half])
        torch.bitwise_right_shift(packed, 4, out=steps[half:])
        if int(steps.min()) < _MIDDLE - _TOP:
            raise PeerError("int4 bytes hold a -8, which no encoder writes: they are damaged or forged")
        rows = torch.empty(len(scales), BLOCK)
        flat = rows.view(-1)
        flat[:count].copy_(steps.view(torch.int8).sub_(_MIDDLE)[:count])
        flat[count:].zero_()
        rows.mul_(scales.view(-1, 1))
        return flat[:count]

    def error(self, largest: float) -> float:
        # Half a step of the scale, which rounding to bfloat16 may have increased by 1/256.
        return max(largest / _TOP, SMALLEST_NORMAL) * 0.5 * (1 + 2.0**-7)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _half(count: int) -> int:
    return -(-count // 2)
