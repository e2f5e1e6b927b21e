"""int8: one byte per value, and a scale per block of 256 values that maps the largest absolute value to 127.

The bytes, for `count` values:

    blocks = ceil(count / 256)
    4 * blocks    scales, float32, one per block
    count         value / scale of its block, rounded to nearest, int8 in -127..127

The scales are float32 to avoid a rounding; they are only 1.6 % of the bytes. No scale is below 1.2e-38, even if all
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

BLOCK: Final = 256
_TOP: Final = 127
_LARGEST_SCALE: Final = torch.nextafter(torch.tensor(LARGEST / _TOP), torch.tensor(0.0)).item()
"""The largest scale of which 127 times is finite."""


class Int8Codec:
    """Error of at most 1/254 of the largest value in a block; rings add the error to the next round's values."""

    name = "int8"
    lossy = True
    varies = False
    feedback = True
    block = BLOCK
    largest = LARGEST

    def size_bytes(self, count: int) -> int:
        return 4 * _blocks(count) + count

    def encode(self, values: Tensor) -> Tensor:
        if not values.is_cpu:
            return self._encode_on_device(values)
        count = values.numel()
        data = torch.empty(self.size_bytes(count), dtype=torch.uint8)
        head = 4 * _blocks(count)
        scales, steps = torch.empty(_blocks(count)), data[head:].view(torch.int8)
        for where, rows, scratch in blocks_and_scratch(values, BLOCK):
            scale = scales[where].unsqueeze(1)
            torch.amax(torch.abs(rows, out=scratch), dim=1, keepdim=True, out=scale)
            scale.mul_(1 / _TOP).clamp_(SMALLEST_NORMAL, _LARGEST_SCALE)
            torch.mul(rows, scale.reciprocal(), out=scratch).round_()
            part = steps[where.start * BLOCK : where.stop * BLOCK]
            part.copy_(scratch.view(-1)[: len(part)])
        data[:head].copy_(bytes_of(scales))
        return data

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        if count == 0:
            return torch.empty(0, device=data.device)
        head = 4 * _blocks(count)
        scales, steps = numbers(data[:head], torch.float32), data[head:].view(torch.int8)
        check_scales(self.name, scales, _LARGEST_SCALE)
        if int(steps.min()) < -_TOP:
            raise PeerError("int8 bytes hold a -128, which no encoder writes: they are damaged or forged")
        rows = torch.empty(len(scales), BLOCK, device=data.device)
        flat = rows.view(-1)
        flat[:count].copy_(steps)
        flat[count:].zero_()
        rows.mul_(scales.view(-1, 1))
        return flat[:count]

    def _encode_on_device(self, values: Tensor) -> Tensor:
        """The same on another device, in few passes: there, launching an operator costs more than memory access."""
        count = values.numel()
        rows = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
        scales = rows.abs().amax(dim=1, keepdim=True).mul_(1 / _TOP).clamp_(SMALLEST_NORMAL, _LARGEST_SCALE)
        steps = torch.mul(rows, scales.reciprocal()).round_().to(torch.int8).view(-1)[:count]
        return torch.cat((bytes_of(scales.view(-1)), bytes_of(steps)))

    def error(self, largest: float) -> float:
        # Half a step, plus the float32 rounding of the scale, the quotient and the product.
        return max(largest / _TOP, SMALLEST_NORMAL) * (0.5 + 1e-4)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)
